"""The passes of a pipeline's stages: memory, operations and messages, from their graphs.

Reads the graphs that `assembly` has written. Opens no session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.memory.forms import Forms, forms_of
from ortflow.workflow.graph.memory.peak_memory import BYTES, Event, events, sizes_of, unknown_of
from ortflow.workflow.graph.rules.size import Type
from ortflow.workflow.graph.stages.costs import KnownCosts
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.parallel.stage import Cost, Stage, StageSet, gradient_from_next
from ortflow.workflow.planning.replay import ChunkMemory

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Work:
    """What one pass computes and what it exchanges within a layer."""

    operations: int
    """Counted; of a stage, its share of all is that of the time that was measured, if it was."""
    collectives: tuple[tuple[Kind, int], ...] = ()
    """Kind and bytes of what each rank puts in."""


@dataclass(frozen=True)
class StagePasses:
    """One stage."""

    memory: ChunkMemory
    forward: Work
    backward: Work
    sent: int
    """Bytes of the activations that it sends."""


@dataclass(frozen=True)
class _Pass:
    """What a pass of a stage runs."""

    forms: Forms

    @classmethod
    def read(cls, path: Path, shapes: Shapes, types_of_inputs: Mapping[str, Type], *, kernels: bool) -> _Pass:
        kernel_form = Form.KERNELS.of(path)
        model = onnx.load(kernel_form) if kernels and kernel_form.exists() else None
        return cls(forms_of(onnx.load(path), model, shapes, types_of_inputs))

    @property
    def types(self) -> dict[str, Type]:
        return self.forms.types

    @property
    def inputs(self) -> set[str]:
        return {str(value.name) for value in self.forms.model.graph.input}

    @property
    def outputs(self) -> list[str]:
        return [str(value.name) for value in self.forms.model.graph.output]

    @property
    def work(self) -> Work:
        return work_of(self.forms.plain.graph, self.forms.model.graph, self.types)

    def events(self, persistent: Sequence[str] = ()) -> tuple[Event, ...]:
        bound = (self.inputs | set(self.outputs)) - set(persistent)
        return tuple(events(self.forms.model.graph, sizes_of(self.types), bound, persistent, self.forms.conditions))

    @property
    def unknown(self) -> tuple[str, ...]:
        return unknown_of(self.forms.model.graph, sizes_of(self.types), self.inputs, self.forms.conditions)


def work_of(plain: onnx.GraphProto, model: onnx.GraphProto, types: Mapping[str, Type]) -> Work:
    """Operations of a graph in its plain form, whose operators are known, and collectives of the form that runs."""
    costs = KnownCosts(types)
    exchanged = [(kind_of(node), costs.bytes(node.input[0])) for node in model.node if is_collective(node)]
    operations = sum(costs.operations(node) for node in plain.node if not is_collective(node))
    return Work(operations, tuple(exchanged))


def stage_passes(root: Path, batch: Shapes, *, kernels: bool) -> list[StagePasses]:
    """The stages of a part whose graphs are in the folder `root`, for batches of these shapes.

    `kernels`: the graphs with ortflow's operators run.
    """
    stages = StageSet.load(root)
    values: dict[str, Type] = {}
    all_passes = []
    for stage in stages.stages:
        sent, passes = _stage(stages, stage, batch, values, kernels=kernels)
        values.update(sent)
        all_passes.append(passes)
    return weighted(all_passes, [stage.cost for stage in stages.stages])


def weighted(stages: Sequence[StagePasses], costs: Sequence[Cost | None]) -> list[StagePasses]:
    """Stages with their operations in the ratio of the measured seconds, if these are known."""
    timed_costs = [(cost.seconds, cost.operations) for cost in costs if cost is not None and cost.seconds is not None]
    seconds, operations = (sum(column) for column in zip(*timed_costs, strict=True)) if timed_costs else (0.0, 0)
    if len(timed_costs) < len(stages) or not seconds:
        return list(stages)
    weighted_stages = []
    for stage, (stage_seconds, counted) in zip(stages, timed_costs, strict=True):
        factor = stage_seconds / seconds * operations / max(1, counted)
        forward, backward = (
            replace(work, operations=round(factor * work.operations)) for work in (stage.forward, stage.backward)
        )
        weighted_stages.append(replace(stage, forward=forward, backward=backward))
    return weighted_stages


def _stage(
    stages: StageSet, stage: Stage, batch: Shapes, values: Mapping[str, Type], *, kernels: bool
) -> tuple[dict[str, Type], StagePasses]:
    """The types of what a stage makes, and its passes. `values` are the types of what earlier stages made."""
    number, last = stage.number, stage.number == len(stages.stages) - 1
    input_shapes = {**batch, **{name: shape for name, (_, shape) in values.items()}}
    forward = _Pass.read(stages.forward(number), input_shapes, values, kernels=kernels)
    # Running statistics and the loss are written to memory of the trainer.
    tied = {LOSS_SUM, LOSS_WEIGHT, *(f"{name}_new" for name in stage.tensors)}
    persistent = [name for name in forward.outputs if name not in tied]
    later = {**input_shapes, **{name: shape for name, (_, shape) in forward.types.items()}}
    later |= {gradient_from_next(v.name): forward.types[v.name][1] for v in stage.sends if v.name in forward.types}
    backward = joint = None
    if stages.backward(number).exists():
        backward = _Pass.read(stages.backward(number), later, forward.types, kernels=kernels)
    if last:
        joint = _Pass.read(stages.both(number), input_shapes, values, kernels=kernels)
    read = backward.inputs if backward is not None else set[str]()
    received, sent = (
        [(v, _bytes(forward.types, v.name)) for v in transfers] for transfers in (stage.receives, stage.sends)
    )
    memory = ChunkMemory(
        forward=forward.events(persistent),
        backward=backward.events() if backward is not None else (),
        joint=joint.events() if joint is not None else None,
        arriving=sum(size for _, size in received),
        stash=sum(size for value, size in received if value.name in read),
        gradients_in=sum(size for value, size in sent if value.gradient),
        gradients_out=sum(size for value, size in received if value.gradient),
        unknown=(*forward.unknown, *(backward.unknown if backward is not None else ())),
    )
    back = backward.work if backward is not None else Work(0)
    return forward.types, StagePasses(memory, forward.work, back, sum(size for _, size in sent))


def _bytes(types: Mapping[str, Type], name: str) -> int:
    kind, shape = types.get(name, (0, ()))
    return math.prod(shape) * BYTES.get(kind, 4)
