"""What a rank will hold in memory, part by part, before a run: `ortflow inspect --plan`.

Makes the graphs as step `configure` does, in a folder that is gone afterwards, reads one batch, and follows the
training graph's values in the order of its nodes. Starts no session of the training graph and asks no device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.memory import ITEM, buffers
from ortflow.workflow.spec.optimizers import moment_counts, moments

if TYPE_CHECKING:
    from ortflow.workflow.graph.memory.plan import Peak
    from ortflow.workflow.graph.shards.graphs import Sharded
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.layout import FlatIndex
    from ortflow.workflow.spec.run import RunSpec

PROCESS = 220_000_000
"""Bytes of a rank on the CPU beside all this, measured: interpreter, libraries, what building the graphs left."""
CONTEXT = 600_000_000
"""Bytes of a GPU that CUDA's context, cuBLAS and cuDNN take for a process. A stated constant."""
SHOWN = 5
"""Of the largest values."""
LOWER = "lower data.micro_batch (train.global_batch keeps the samples of a step)"
ADVICE = {
    "parameters": "parallel.zero: 3 shards them over several CPU ranks; otherwise use a smaller model or a machine "
    "with more memory",
    "gradients": "train.gradient_accumulation: 1 stores them once; parallel.zero: 3 shards them over the ranks, 2 "
    "those that are accumulated",
    "moments": "parallel.zero: 1 shards them over several CPU ranks; train.optimizer.name sets the values "
    f"stored per parameter: {moment_counts()}",
    "activations": f"{LOWER}, or name modules in model.recompute",
    "batch": LOWER,
}
"""Part -> the setting that makes it smaller."""


@dataclass(frozen=True)
class Forecast:
    """Bytes by part, and what the largest values of the training graph are."""

    device: str
    """cpu or cuda."""
    micro_batch: int
    parts: Mapping[str, int]
    peak: Peak
    recomputed: tuple[str, ...]
    """model.recompute."""
    formulas: Mapping[str, str]
    """How the bytes of a part follow from the run file, where that is a product."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most, of those that a setting changes."""
        return max(ADVICE, key=lambda part: self.parts.get(part, 0))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device, "micro_batch": self.micro_batch, "parts": dict(self.parts), "total": self.total,
            "largest": self.largest, "fix": ADVICE[self.largest], "node": self.peak.node,
            "alive": self.peak.size, "values": [list(item) for item in self.peak.values[:SHOWN]],
            "unknown": list(self.peak.unknown), "recomputed": list(self.recomputed),
            "formulas": dict(self.formulas),
        }  # fmt: skip


def forecast(spec: RunSpec) -> Forecast:
    """Of a run whose paths are absolute. Raises UserError or Faults where its model or data cannot be used."""
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.plan import Plan
    from ortflow.workflow.progress import Progress
    from ortflow.workflow.ranks import Place
    from ortflow.workflow.rundir import RunDir
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.steps.shard import Stream
    from ortflow.workflow.trainer import Report
    from ortflow.workflow.trainers import builder_of

    if spec.trainer.name != "graph":
        raise UserError(
            f"is {spec.trainer.name}, and memory is predicted only for the trainer graph",
            where="trainer.name",
            fix="start the run: its event memory reports it",
        )
    if spec.divides:
        raise UserError(
            "divides the model over the ranks, and memory is predicted only for a model that each rank holds whole",
            where="parallel",
            fix="start the run: its event memory reports it",
        )
    with tempfile.TemporaryDirectory(prefix="ortflow-plan-") as folder:
        run_dir, report = RunDir(Path(folder)), Report()
        builder = builder_of(spec, run_dir, report)
        prepare(builder, run_dir, spec, report)
        place = Place(0, spec.world_size, 0, spec.resources.ranks_per_node, "none", "localhost")
        stream = Stream(spec, Plan.load(run_dir.plan), *builder.inputs(), place, Progress())
        try:
            arrays = stream.next().micro_batches[0].arrays
        finally:
            stream.close()
        graphs = GraphSet.load(run_dir.graphs)
        shards = _shards(graphs, spec)
        peak = activations(graphs, spec, {name: array.shape for name, array in arrays.items()}, shards)
    batch = sum(array.nbytes for array in arrays.values())
    return Forecast(
        "cuda" if spec.on_gpus else "cpu", spec.data.micro_batch, _parts(graphs, spec, peak, batch, shards), peak,
        tuple(spec.onnx_model.recompute), formulas(graphs.index, spec, shards),
    )  # fmt: skip


def formulas(index: FlatIndex, spec: RunSpec, shards: Sharded | None = None) -> dict[str, str]:
    """Elements include padding; a rank's share of them is rounded up to a multiple of `layout.ALIGNMENT`."""
    zero, kept = spec.parallel.zero, len(moments(spec.train.optimizer))
    trained, (start, end) = f"{index.trained:,}", index.span("state")
    ranks = f" / {spec.world_size} rank(s)"
    accumulated = "" if spec.accumulation == 1 else f" + {trained}{ranks if zero >= 2 else ''}"
    statistics = f" + 2 x {end - start:,}" if end > start else ""
    if shards is not None:
        rest = index.size - index.trained
        behind = f" + {rest:,} + {index.size:,}{ranks}" if rest else ""
        layer, message = _messages(shards, index)
        return {
            "parameters": f"{ITEM} B x ({trained}{ranks}{behind})",
            "gradients": f"{ITEM} B x ({trained}{ranks}{statistics})",
            "moments": f"{kept} x {ITEM} B x {trained}{ranks}",
            "messages": f"{ITEM} B x ({layer:,} of the largest layer + {message:,} of gradients)",
        }
    return {
        "gradients": f"{ITEM} B x ({trained}{accumulated}{statistics})",
        "moments": f"{kept} x {ITEM} B x {trained}{ranks if zero else ''}",
    }


def _shards(graphs: GraphSet, spec: RunSpec) -> Sharded | None:
    """The graphs that fetch their parameters, under stage 3 of ZeRO."""
    if spec.parallel.zero < 3:
        return None
    from ortflow.workflow.graph.shards.graphs import sharded

    return sharded(graphs.train, _form(graphs, spec) or graphs.train, graphs.eval, graphs.index)


def _messages(shards: Sharded, index: FlatIndex) -> tuple[int, int]:
    """Elements of the memory in which parameters arrive, and of a message of gradients."""
    from ortflow.workflow.graph.shards.program import Fetch, Send, largest
    from ortflow.workflow.trainer.exchange import MESSAGE

    counts = {entry.name: entry.tensor.count for entry in index}
    programs = (shards.train[1], shards.eval[1])
    fetched, sent = (max(largest(program, counts, kind) for program in programs) for kind in (Fetch, Send))
    return fetched, min(sent, MESSAGE)


def activations(
    graphs: GraphSet, spec: RunSpec, batch: Mapping[str, tuple[int, ...]], shards: Sharded | None = None
) -> Peak:
    """The moment at which the training graph's values take most, for inputs of these shapes.

    With `shards` the layers that are fetched and their gradients are among them.
    """
    import onnx

    from ortflow.workflow.graph.memory.concrete import concrete
    from ortflow.workflow.graph.memory.plan import peak_of, sizes_of

    plain = onnx.load(graphs.train)
    types = concrete(plain, batch)
    model, form = plain, _form(graphs, spec)
    if form is not None:
        model = onnx.load(form)
        # Values that both have are of the same shape; nodes of our own keep the names of what they stand for.
        types = {**types, **concrete(model, batch, types)}
    if shards is not None:
        model = shards.train[0]
        types = {**types, **concrete(model, batch, types)}
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, sizes_of(types), bound)


def _form(graphs: GraphSet, spec: RunSpec) -> Path | None:
    """The training graph as the device runs it, as far as it is known here; None for the plain one."""
    from ortflow.workflow.graph.types import fused_of, half_of, on_cuda_of, with_kernels_of

    if spec.on_gpus:
        forms = [half_of(graphs.train)] if spec.train.precision in ("fp16", "bf16") else []
        forms += [fused_of(graphs.train)] if spec.resources.kernels == "auto" else []
        forms.append(on_cuda_of(graphs.train))
    else:
        from ortflow.workflow.kernels.library import library_for

        forms = [with_kernels_of(graphs.train)] if library_for(spec.kernels) is not None else []
    return next((path for path in forms if path.exists()), None)


def _parts(graphs: GraphSet, spec: RunSpec, peak: Peak, batch: int, shards: Sharded | None) -> dict[str, int]:
    trained, size = graphs.index.trained, graphs.index.size
    start, end = graphs.index.span("state")
    held = buffers(
        trained, size - trained, len(moments(spec.train.optimizer)),
        accumulation=spec.accumulation, world_size=spec.world_size, zero=spec.parallel.zero,
        messages=0 if shards is None else sum(_messages(shards, graphs.index)),
    )  # fmt: skip
    # Running statistics lie behind the gradients, and once more where a micro-batch starts from.
    held["gradients"] += 2 * (end - start) * ITEM
    checkpoint = held.pop("checkpoint")
    parts = {**held, "batch": batch, "activations": peak.held}
    if spec.on_gpus:
        return {**parts, "context": CONTEXT}
    return {**parts, "checkpoint": checkpoint, "process": PROCESS}
