"""Predicts a rank's memory by part, before a run: `ortflow inspect --plan`.

Builds the graphs as step `configure` does, in a temporary folder, reads one batch, and follows the training graph's
values in the order of its nodes. Opens no session of the training graph and queries no device.
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
    from ortflow.workflow.rundir import RunDir
    from ortflow.workflow.spec.model import Recomputed
    from ortflow.workflow.spec.run import RunSpec

PROCESS = 220_000_000
"""Further bytes of a rank on the CPU, measured: interpreter, libraries, and memory left from building the graphs."""
CONTEXT = 600_000_000
"""Bytes of a GPU that CUDA's context, cuBLAS and cuDNN use per process. A fixed estimate."""
SHOWN = 5
"""Number of largest values to report."""
LOWER = "lower data.micro_batch (train.global_batch keeps the samples of a step)"
ADVICE = {
    "parameters": "parallel.zero: 3 shards them over several CPU ranks; otherwise use a smaller model or a machine "
    "with more memory",
    "gradients": "train.gradient_accumulation: 1 stores them once; parallel.zero: 3 shards them over the ranks, 2 "
    "those that are accumulated",
    "moments": "parallel.zero: 1 shards them over several CPU ranks; train.optimizer.name sets the values "
    f"stored per parameter: {moment_counts()}",
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

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())

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
            "formulas": dict(self.formulas),
        }  # fmt: skip


def forecast(spec: RunSpec) -> Forecast:
    """Predict the memory of a run with absolute paths. Raises UserError or Faults if its model or data is unusable."""
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
    with tempfile.TemporaryDirectory(prefix="ortflow-plan-") as folder, tempfile.TemporaryDirectory() as other:
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
        shards, shapes = _shards(graphs, spec), {name: array.shape for name, array in arrays.items()}
        peak = activations(graphs, spec, shapes, shards)
        saving = _saving(graphs, spec, shapes, RunDir(Path(other))) if spec.onnx_model.recompute else None
    batch = sum(array.nbytes for array in arrays.values())
    return Forecast(
        "cuda" if spec.on_gpus else "cpu", spec.data.micro_batch, _parts(graphs, spec, peak, batch, shards), peak,
        spec.onnx_model.recompute, saving, formulas(graphs.index, spec, shards),
    )  # fmt: skip


def _saving(graphs: GraphSet, spec: RunSpec, batch: Mapping[str, tuple[int, ...]], run_dir: RunDir) -> Saving:
    """Compare with graphs that recompute nothing, which are built in `run_dir`."""
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.steps.configure import prepare
    from ortflow.workflow.trainer import Report
    from ortflow.workflow.trainers import builder_of

    model = spec.onnx_model.model_copy(update={"recompute": []})
    plain, report = spec.model_copy(update={"model": model}), Report()
    prepare(builder_of(plain, run_dir, report), run_dir, plain, report)
    kept = GraphSet.load(run_dir.graphs)
    held = activations(kept, plain, batch, _shards(kept, plain)).held
    return Saving(held, operations(graphs.train, batch) / operations(kept.train, batch))


def operations(path: Path, batch: Mapping[str, tuple[int, ...]]) -> int:
    """Operations of a training graph that contains ONNX's operators alone, for inputs of these shapes."""
    import onnx

    from ortflow.workflow.graph.memory.concrete import concrete
    from ortflow.workflow.graph.stages.costs import Costs

    model = onnx.load(path)
    types = {name: onnx.helper.make_tensor_type_proto(*kind) for name, kind in concrete(model, batch).items()}
    costs = Costs(model, {}, 1, types)
    return sum(costs.operations(node) for node in model.graph.node)


def formulas(index: FlatIndex, spec: RunSpec, shards: Sharded | None = None) -> dict[str, str]:
    """Formulas by part. Elements include padding; a rank's share is rounded up to a multiple of `layout.ALIGNMENT`."""
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
    """The peak of the training graph's values, for inputs of these shapes.

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
        # Values of both graphs have the same shape; our own nodes keep the names of the values they replace.
        types = {**types, **concrete(model, batch, types)}
    if shards is not None:
        model = shards.train[0]
        types = {**types, **concrete(model, batch, types)}
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, sizes_of(types), bound)


def _form(graphs: GraphSet, spec: RunSpec) -> Path | None:
    """The training graph in its form for the device, as far as it is known here; None for the plain one."""
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
    # Running statistics are stored after the gradients, and once more as the start of a micro-batch.
    held["gradients"] += 2 * (end - start) * ITEM
    checkpoint = held.pop("checkpoint")
    parts = {**held, "batch": batch, "activations": peak.held}
    if spec.on_gpus:
        return {**parts, "context": CONTEXT}
    return {**parts, "checkpoint": checkpoint, "process": PROCESS}
