"""The time of a step under a layout, from operations, bytes and rates. Pure.

Passes take as long as their operations. The schedule of a pipeline is followed action by action, so that unequal stages
and the wait at its ends count. Then come the sums over replicas, the tensors that stages share, and the update.
Communication of replicas is not overlapped with the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.memory import ITEM
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.grid import Place
from ortflow.workflow.parallel.schedule import Action, schedule
from ortflow.workflow.parallel.ties import ties
from ortflow.workflow.parallel.timeline import bubble_by_formula, timeline
from ortflow.workflow.planning.passes import StagePasses, Work
from ortflow.workflow.planning.rates import Link, Rates
from ortflow.workflow.spec.run import TrainerRunSpec

CONTROL = 4
"""Small sums over all ranks in a step: loss and control values, norm, statistics."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest rank, by part."""

    passes: float
    """Forward and backward passes, including waits and what they exchange."""
    gradients: float
    """Sums of gradients over the replicas and between stages, and gathers of parameters."""
    update: float
    bubble: float
    """Fraction of `passes` in which ranks of a pipeline wait, averaged over them."""
    formula: float
    """The same for stages that take equally long and messages that take no time."""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.passes + self.gradients + self.update


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self, spec: TrainerRunSpec, rates: Rates) -> None:
        self._spec, self._rates, self._grid = spec, rates, spec.grid

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link among ranks."""
        ranks_per_node = self._spec.resources.ranks_per_node
        one_machine = len({rank // ranks_per_node for rank in ranks}) < 2
        return self._rates.inside if one_machine else self._rates.outside

    def work(self, work: Work) -> float:
        """Seconds of a pass."""
        ranks, total = self._grid.parts(0), work.operations / self._rates.operations
        link = self.link(ranks)
        for kind, size in work.collectives:
            if kind in (Kind.ALL_REDUCE, Kind.ALL_REDUCE_MAX):
                total += link.all_reduce(size, len(ranks))
            elif kind == Kind.ALL_GATHER:
                total += link.shift(size * len(ranks), len(ranks))
            elif kind == Kind.REDUCE_SCATTER:
                total += link.shift(size, len(ranks))
        return total

    def pipeline(self, stages: Sequence[StagePasses]) -> tuple[float, float]:
        """Seconds of the passes of a step, and the bubble."""
        parallel, ranks = self._spec.parallel, self._grid.pipeline
        actions = schedule(parallel.schedule, ranks, self._spec.accumulation, parallel.chunks)
        forward, backward = (
            [self.work(stage.forward) for stage in stages],
            [self.work(stage.backward) for stage in stages],
        )
        transfer = self.link(self._grid.stages(0)).send(max(stage.sent for stage in stages))

        def duration(rank: int, action: Action) -> float:
            stage = action.stage(rank, ranks)
            return forward[stage] if action.direction == "forward" else backward[stage]

        pass_timeline = timeline(actions, duration, transfer)
        return pass_timeline.end, pass_timeline.bubble

    def replicas(self, index: FlatIndex) -> float:
        """Seconds of what replicas exchange in a step about the tensors of an index."""
        zero, count, size = self._spec.parallel.zero, self._spec.accumulation, index.trained * ITEM
        ranks = self._grid.replicas(0)
        link, many = self.link(ranks), len(ranks)
        if zero == 3:
            # Fetched for the forward and again for the backward pass of each micro-batch.
            half = self._spec.on_gpus and self._spec.train.precision in HALF_PRECISIONS
            fetched = index.trained * (2 if half else ITEM)
            return count * (2 * link.shift(fetched, many) + link.shift(size, many))
        # Stage 2 reduces the gradients of each micro-batch to their shares, and gathers the parameters once.
        if zero == 2 and count > 1:
            return (count + 1) * link.shift(size, many)
        # Stage 1 sends as much: its reduce-scatter and gather are the two halves of a ring's all-reduce.
        return link.all_reduce(size, many)

    def shared(self, division: Division, place: Place) -> float:
        """Seconds of the gradients and the update of tensors that stages share."""
        link, total = self.link(self._grid.stages(0)), 0.0
        for tie in ties(division, place):
            size = (tie.stop - tie.start) * ITEM
            total += link.all_reduce(size, len(tie.stages)) + link.send(size)
        return total

    def update(self, index: FlatIndex) -> float:
        """Seconds of the update of an index' tensors, and of the sums that control it."""
        replicas = self._grid.data if self._spec.parallel.zero else 1
        world = self._grid.world_size
        control = CONTROL * 2 * (world - 1) * self.link(range(world)).latency
        return self._rates.update * index.trained / replicas + control


def step_time(
    spec: TrainerRunSpec,
    rates: Rates,
    model_index: FlatIndex,
    work: Work | Sequence[StagePasses],
    division: Division | None = None,
) -> StepTime:
    """The time of a step of the slowest rank.

    Parameters
    ----------
    spec
        The run, under its layout.
    rates
        Of its ranks.
    model_index
        The index of the undivided model.
    work
        Forward and backward pass of a micro-batch on a rank that has all layers, or the stages of the pipeline.
    division
        How the model is divided, if it is.
    """
    clock, grid = Clock(spec, rates), spec.grid
    if isinstance(work, Work):
        passes, bubble = spec.accumulation * clock.work(work), 0.0
    else:
        passes, bubble = clock.pipeline(work)
    formula = bubble_by_formula(grid.pipeline, spec.accumulation, spec.parallel.chunks)
    if division is None:
        return StepTime(passes, clock.replicas(model_index), clock.update(model_index), bubble, formula)
    behind = []
    for stage in range(grid.pipeline):
        place = Place(0, stage, 0)
        index = division.of(place).index
        behind.append((clock.replicas(index) + clock.shared(division, place), clock.update(index)))
    gradients, update = max(behind, key=sum)
    return StepTime(passes, gradients, update, bubble, formula)
