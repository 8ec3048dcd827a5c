"""Predicts a rank's memory by part, before a run: `ortflow inspect --plan`.

Builds the graphs as step `configure` does, in a temporary folder, reads one batch, and follows the training graph's
values in the order of its nodes. Opens no session of the training graph and queries no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.workflow.memory import of_device
from ortflow.workflow.parallel.division import folder_of
from ortflow.workflow.spec.optimizers import moment_counts

if TYPE_CHECKING:
    from ortflow.workflow.graph.memory.forms import Forms
    from ortflow.workflow.graph.memory.peak_memory import Peak
    from ortflow.workflow.graph.shards.graphs import Sharded
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.layout import FlatIndex
    from ortflow.workflow.planning.built import Built
    from ortflow.workflow.planning.passes import Work
    from ortflow.workflow.planning.ranks import RankMemory
    from ortflow.workflow.planning.receive_buffers import Exchange
    from ortflow.workflow.spec.model import Recomputed
    from ortflow.workflow.spec.run import TrainerRunSpec

SHOWN = 5
"""Number of largest values to report."""
LOWER = "lower data.micro_batch (train.global_batch keeps the samples of a step)"
ADVICE = {
    "parameters": "parallel.zero: 3, parallel.pipeline or parallel.horizontal divides them over several "
    "ranks; otherwise use a smaller model or a machine with more memory",
    "gradients": "train.gradient_accumulation: 1 stores them once; parallel.zero: 2 shards those that are "
    "accumulated over the ranks, 3 all",
    "moments": "parallel.zero: 1 shards them over several ranks; on GPUs, train.offload: optimizer stores them on the "
    f"host; train.optimizer.name sets the values stored per parameter: {moment_counts()}",
    "activations": f"{LOWER}, or set model.recompute: layers",
    "batch": LOWER,
}
"""Part -> the setting that reduces it."""


@dataclass(frozen=True)
class Saving:
    """What `model.recompute` changes: the same run without it."""

    activations: int
    """Bytes without recomputation."""
    operations: float
    """Operations of a micro-batch with it, relative to those without; the time follows them roughly."""


@dataclass(frozen=True)
class Forecast:
    """Bytes by part, and the largest values of the training graph."""

    device: str
    """cpu or cuda."""
    micro_batch: int
    parts: Mapping[str, int]
    peak: Peak
    recomputed: Recomputed
    """`model.recompute`."""
    saving: Saving | None
    """What `model.recompute` changes; None if it is not set."""
    formulas: Mapping[str, str]
    """How the bytes of a part follow from the run file, if it is a product."""
    rank: int = 0
    """The rank that needs most."""
    ranks: int = 1
    """Ranks of the run."""

    @property
    def total(self) -> int:
        """Total bytes of the device."""
        return of_device(self.parts, gpu=self.device == "cuda")

    @property
    def largest(self) -> str:
        """The largest part that a setting reduces."""
        return max(ADVICE, key=lambda part: self.parts.get(part, 0))

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable data."""
        return {
            "device": self.device, "micro_batch": self.micro_batch, "parts": dict(self.parts), "total": self.total,
            "largest": self.largest, "fix": ADVICE[self.largest], "node": self.peak.node,
            "alive": self.peak.size, "values": [list(item) for item in self.peak.values[:SHOWN]],
            "unknown": list(self.peak.unknown), "recomputed": self.recomputed,
            "without_recompute": None if self.saving is None else vars(self.saving),
            "formulas": dict(self.formulas), "rank": self.rank, "ranks": self.ranks,
        }  # fmt: skip


def forecast(spec: TrainerRunSpec) -> Forecast:
    """Predict the memory of a run with absolute paths. Raises UserError or Faults if its model or data is unusable."""
    import onnx

    from ortflow.workflow.assembly.saving import operations, without_recomputation
    from ortflow.workflow.planning.built import built
    from ortflow.workflow.planning.formulas import formulas

    with built(spec) as built_run:
        memory, messages, exchange = _memory(spec, built_run)
        index = built_run.graphs.index if not spec.divides else _index_of(spec, built_run.graphs, memory.rank)
        part_formulas, saving = formulas(index, spec, messages, exchange), None
        if spec.onnx_model.recompute:
            plain = without_recomputation(spec)
            with built(plain) as plain_run:
                plain_activations = _memory(plain, plain_run)[0].parts["activations"]
                now, before = (operations(onnx.load(run.graphs.train), run.shapes) for run in (built_run, plain_run))
                saving = Saving(plain_activations, now / before)
    return Forecast(
        "cuda" if spec.on_gpus else "cpu", spec.data.micro_batch, memory.parts, memory.peak,
        spec.onnx_model.recompute, saving, part_formulas, memory.rank, spec.world_size,
    )  # fmt: skip


def _memory(spec: TrainerRunSpec, built_run: Built) -> tuple[RankMemory, tuple[int, int] | None, Exchange]:
    """The memory of the rank that needs most, `messages_of` it if it fetches its parameters, and `exchange_in` it."""
    from ortflow.workflow.planning.ranks import memory_of, most

    graphs, exchange = built_run.graphs, exchange_in(built_run.graphs, spec)
    if spec.divides:
        return most(divided_memory(spec, graphs, built_run.shapes, built_run.bytes)), None, exchange
    shards = shards_of(graphs, spec)
    peak, fetched = activations(graphs, spec, built_run.shapes, shards), messages_of(shards, graphs.index, spec)
    memory = memory_of(spec, graphs.index, peak, built_run.bytes, fetched=sum(fetched), messages=exchange.size)
    return memory, fetched if shards is not None else None, exchange


def exchange_in(graphs: GraphSet, spec: TrainerRunSpec) -> Exchange:
    """The buffers in which a GPU receives the gradients of others of its machine."""
    from ortflow.workflow.planning.receive_buffers import exchange_of

    return exchange_of(spec, _form(graphs, spec), graphs.index, graphs.elements(spec.data.micro_batch))


def divided_memory(
    spec: TrainerRunSpec, graphs: GraphSet, shapes: Mapping[str, tuple[int, ...]], batch: int
) -> list[RankMemory]:
    """The memory of the ranks of one replica of a divided model, for a batch of these shapes and so many bytes."""
    from ortflow.workflow.planning.passes import stage_passes
    from ortflow.workflow.planning.ranks import part_memory, pipeline_memory, replays_of
    from ortflow.workflow.trainer.divided_opening import division_of

    division, folder = division_of(graphs, spec), folder_of(graphs.root, 0)
    if spec.parallel.pipeline == 1:
        peak = activations(replace(graphs, root=folder), spec, shapes)
        return part_memory(spec, graphs.index, division, peak, batch)
    stages = stage_passes(folder, shapes, kernels=has_kernels(spec))
    return pipeline_memory(spec, graphs.index, division, replays_of(spec, stages), batch)


def _index_of(spec: TrainerRunSpec, graphs: GraphSet, rank: int) -> FlatIndex:
    from ortflow.workflow.trainer.divided_opening import division_of

    return division_of(graphs, spec).of(spec.grid.place(rank)).index


def shards_of(graphs: GraphSet, spec: TrainerRunSpec) -> Sharded | None:
    """The graphs that fetch their parameters, under stage 3 of ZeRO."""
    if spec.parallel.zero < 3:
        return None
    from ortflow.workflow.graph.shards.graphs import sharded

    form = _form(graphs, spec) or graphs.train
    return sharded(graphs.train, form, graphs.eval, graphs.index, on_gpus=spec.on_gpus)


def messages_of(shards: Sharded | None, index: FlatIndex, spec: TrainerRunSpec) -> tuple[int, int]:
    """Elements of the memory in which parameters arrive, and of a message of gradients; 0 without stage 3.

    On GPUs parameters arrive in the memory of the graph's values, and gradients have memory of their own where they are
    added to others.
    """
    if shards is None:
        return 0, 0
    from ortflow.workflow.graph.shards.program import Fetch, Send, largest
    from ortflow.workflow.trainer.shard_exchange import MESSAGE

    counts = {entry.name: entry.tensor.count for entry in index}
    programs = (shards.train[1], shards.eval[1])
    fetched, sent = (max(largest(program, counts, kind) for program in programs) for kind in (Fetch, Send))
    if spec.on_gpus:
        return 0, sent if spec.accumulation > 1 else 0
    return fetched, min(sent, MESSAGE)


def activations(
    graphs: GraphSet, spec: TrainerRunSpec, batch: Mapping[str, tuple[int, ...]], shards: Sharded | None = None
) -> Peak:
    """The peak of the training graph's values, for inputs of these shapes.

    With `shards` the layers that are fetched and their gradients are among them.
    """
    from ortflow.workflow.graph.memory.peak_memory import peak_of, sizes_of

    forms = _followed(graphs, spec, batch)
    model, types = forms.model, forms.types
    if shards is not None:
        from ortflow.workflow.graph.memory.concrete import concrete

        model = shards.train[0]
        types = {**types, **concrete(model, batch, types)}
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, sizes_of(types), bound, forms.conditions)


def training_work(graphs: GraphSet, spec: TrainerRunSpec, batch: Mapping[str, tuple[int, ...]]) -> Work:
    """What the training graph computes, and exchanges within layers, for inputs of these shapes."""
    from ortflow.workflow.planning.passes import work_of

    forms = _followed(graphs, spec, batch)
    return work_of(forms.plain.graph, forms.model.graph, forms.types)


def _followed(graphs: GraphSet, spec: TrainerRunSpec, batch: Mapping[str, tuple[int, ...]]) -> Forms:
    """The training graph in its plain form and in the one for the device."""
    import onnx

    from ortflow.workflow.graph.memory.forms import forms_of

    form = _form(graphs, spec)
    return forms_of(onnx.load(graphs.train), None if form is None else onnx.load(form), batch)


def has_kernels(spec: TrainerRunSpec) -> bool:
    """Whether ranks on CPUs would have ortflow's kernels here."""
    from ortflow.workflow.kernels.library import library_for

    return library_for(spec.kernels) is not None


def _form(graphs: GraphSet, spec: TrainerRunSpec) -> Path | None:
    """The training graph in its form for the device, as far as it is known here; None for the plain one."""
    from ortflow.workflow.graph.forms import Target
    from ortflow.workflow.spec.train import HALF_PRECISIONS

    kernels = spec.resources.kernels == "auto" if spec.on_gpus else has_kernels(spec)
    return Target(spec.on_gpus, kernels, spec.train.precision in HALF_PRECISIONS).form_of(graphs.train)
