"""Chooses the parts of a trainer from the layout and the device, and puts them together on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import share
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.averages import BUFFER
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.buffers import StepBuffers, UpdateInputs, UpdateMemory
from ortflow.workflow.trainer.canonical import CanonicalState
from ortflow.workflow.trainer.check.checker import ShardsChecker, WholeChecker
from ortflow.workflow.trainer.check.divided_checker import CheckedHolding, DividedChecker
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.divided_reduction import DividedReduction
from ortflow.workflow.trainer.evaluator import Evaluator, together
from ortflow.workflow.trainer.export.exporter import LentExporter, WholeExporter
from ortflow.workflow.trainer.graph_binder import GraphBinder
from ortflow.workflow.trainer.loop import ImmediateLoop, Loop, StepParts
from ortflow.workflow.trainer.parameters import Parameters, WholeParameters
from ortflow.workflow.trainer.passes import Passes
from ortflow.workflow.trainer.reduction import AllReduce, Reduction, Scatter
from ortflow.workflow.trainer.saved_state import HeldState, WholeModelState
from ortflow.workflow.trainer.shard_passes import ShardPasses, check_kernels
from ortflow.workflow.trainer.sharded_parameters import ShardedParameters
from ortflow.workflow.trainer.share_update import (
    MomentStore,
    ResidentMoments,
    ShareUpdate,
    note_shares,
    share_memory,
    span_of,
)
from ortflow.workflow.trainer.stage_passes import Repeater, StagePasses
from ortflow.workflow.trainer.step import GraphTrainer, Training
from ortflow.workflow.trainer.thaw import Thaw
from ortflow.workflow.trainer.update import PieceBinder, Update, WholeUpdate, whole_memory
from ortflow.workflow.trainer.whole_passes import WholePasses
from ortflow.workflow.trainer.work import HostWork

if TYPE_CHECKING:
    from ortflow.workflow.comm.nccl import NcclCommunicator
    from ortflow.workflow.trainer.check.precision_difference import PrecisionDifference
    from ortflow.workflow.trainer.queued_work import QueuedWork

LoopName = Literal["immediate", "queued"]


@dataclass(frozen=True)
class Parts:
    """The parts of a step for a layout."""

    passes: Literal["whole", "stages", "shards"]
    reduction: Literal["all-reduce", "scatter", "in the graph", "divided"]
    """A GPU may do an all-reduce in buckets, by copies or by NCCL: `overlap`."""
    update: Literal["whole", "share", "streamed"]


LAYOUTS: Mapping[str, Parts] = {
    "whole": Parts("whole", "all-reduce", "whole"),
    "whole, moments on the host": Parts("whole", "scatter", "streamed"),
    "ZeRO 1 and 2": Parts("whole", "scatter", "share"),
    "ZeRO 1 and 2, moments on the host": Parts("whole", "scatter", "streamed"),
    "ZeRO 3": Parts("shards", "in the graph", "share"),
    "ZeRO 3, moments on the host": Parts("shards", "in the graph", "streamed"),
    "parts of layers": Parts("whole", "divided", "share"),
    "pipeline": Parts("stages", "divided", "share"),
}
LOOPS: Mapping[str, LoopName] = {"cpu": "immediate", "cuda": "queued"}
"""By kind of device."""


def layout_of(spec: TrainerRunSpec) -> str:
    """The layout of a run."""
    if spec.divides:
        return "pipeline" if spec.parallel.pipeline > 1 else "parts of layers"
    layout = {0: "whole", 1: "ZeRO 1 and 2", 2: "ZeRO 1 and 2", 3: "ZeRO 3"}[spec.parallel.zero]
    return layout if spec.train.offload == "none" else f"{layout}, moments on the host"


@dataclass(frozen=True)
class Divided:
    """A divided model."""

    graphs: GraphSet
    """Of the whole model."""
    ranks: GridRanks
    division: Division


def open_trainer(
    graphs: GraphSet,
    spec: TrainerRunSpec,
    sessions: Sessions,
    communicator: Communicator,
    report: Report | None = None,
    *,
    training: bool = True,
    loop: LoopName | None = None,
) -> GraphTrainer:
    """The trainer of a model that is not divided; the parameters are not set.

    `loop` is that of the device unless it is given. Without `training`, it has all parameters and only exports.
    """
    context = StepContext(graphs, spec, sessions, communicator, report or Report())
    loop = loop or LOOPS[sessions.device.kind]
    return Assembly(context, LAYOUTS[layout_of(spec)], loop).trainer() if training else exporting(context)


def exporting(context: StepContext) -> GraphTrainer:
    """A trainer in the state after `end_training`."""
    parameters, moments = WholeParameters(context.device, context.index), {}
    if context.spec.train.average is not None:
        moments[BUFFER] = context.device.allocate(context.index.trained, np.float32)
    saved, exporter = HeldState(parameters, moments), WholeExporter(context, parameters)
    return GraphTrainer(context, parameters, moments, saved, exporter, None, graphs=context.graphs)


class Assembly:
    """Makes the parts, each from those before it."""

    def __init__(self, context: StepContext, parts: Parts, loop: LoopName, divided: Divided | None = None) -> None:
        self.context, self._chosen, self._divided = context, parts, divided
        self._zero = context.spec.parallel.zero
        sharded, queued = parts.passes == "shards", loop == "queued"
        if sharded:
            check_kernels(context.sessions, queued=queued)
            self._parameters: Parameters = ShardedParameters(context.device, context.index, context.replicas)
        else:
            self._parameters = WholeParameters(context.device, context.index)
        self._buffers = StepBuffers(context.device, context.index, 0 if sharded else context.index.trained)
        self._thaw = Thaw(context.spec.train)
        self._inputs = UpdateInputs(context.device, self._thaw.missed)
        self._work = self._work_of(queued=queued)
        self._store: MomentStore | None = None
        self._memory = self._memory_of()
        self._binder = GraphBinder(context.index, self._parameters.here, self._buffers, self._work)

    def _work_of(self, *, queued: bool) -> HostWork | QueuedWork:
        if not queued:
            return HostWork(self.context)
        from ortflow.workflow.trainer.queued_work import QueuedWork

        return QueuedWork(self.context, self._buffers)

    @property
    def _added_up(self) -> bool:
        """Whether gradients of a share are added up in memory of their own."""
        return self._zero == 3 or (self._zero == 2 and self.context.spec.accumulation > 1)

    def _memory_of(self) -> UpdateMemory:
        context, buffers, span = self.context, self._buffers, span_of(self.context)
        match self._chosen.update:
            case "whole":
                return whole_memory(context, buffers)
            case "share":
                store: MomentStore = ResidentMoments(context, *span)
            case "streamed":
                from ortflow.workflow.trainer.streamed_moments import StreamedMoments

                store = StreamedMoments(context, *span)
        self._store = store
        memory = share_memory(context, buffers, store, span, added_up=self._added_up)
        note_shares(context, memory, buffers, added_up=self._added_up)
        return memory

    def trainer(self) -> GraphTrainer:
        """The trainer of a rank."""
        match self._chosen.passes:
            case "whole":
                return self._with_whole_passes()
            case "stages":
                return self._with_stages()
            case "shards":
                return self._with_shards()

    def _with_whole_passes(self) -> GraphTrainer:
        context, parameters = self.context, self._whole_parameters()
        parts = self._queued_parts()
        passes = WholePasses(context, parameters, self._memory, self._binder, self._work, parts)
        step = self._step(passes, passes)
        if self._divided is not None:
            return self._divided_trainer(step, self._divided, parameters)
        loop, precision = self._loop_of(step), self._precision(passes)
        checker = WholeChecker(step, passes, parameters, precision)
        training = Training(step, loop, Evaluator(context, passes, context.replicas), checker)
        moments = self._memory.moments
        saved, exporter = HeldState(parameters, moments), WholeExporter(context, parameters)
        return GraphTrainer(context, parameters, moments, saved, exporter, training, graphs=context.graphs)

    def _with_stages(self) -> GraphTrainer:
        assert self._divided is not None
        passes = StagePasses(self.context, self._memory, self._binder, self._divided.ranks, self._repeater())
        return self._divided_trainer(self._step(passes), self._divided, self._whole_parameters(), passes)

    def _with_shards(self) -> GraphTrainer:
        context, parameters, moments = self.context, self._parameters, self._memory.moments
        assert isinstance(parameters, ShardedParameters)
        passes = ShardPasses(context, parameters, self._memory.gradients, self._binder, self._work)
        step = self._step(passes)
        loop, precision = self._loop_of(step), self._precision(passes)
        checker = ShardsChecker(step, passes, parameters, precision, waits=self._work.queued)
        evaluator = Evaluator(context, passes, context.replicas, in_step=passes.in_step)
        training, saved = Training(step, loop, evaluator, checker, passes), HeldState(parameters, moments)
        exporter = LentExporter(context, context.graphs, context.replicas, parameters.sent_by, lambda: parameters.here)
        return GraphTrainer(
            context, parameters, moments, saved, exporter, training, graphs=context.graphs, together=True
        )  # fmt: skip

    def _divided_trainer(
        self, step: StepParts, divided: Divided, parameters: WholeParameters, stages: StagePasses | None = None
    ) -> GraphTrainer:
        context, ranks = self.context, divided.ranks
        loop, precision = self._loop_of(step), self._precision(step.passes)
        holding = CheckedHolding(step, parameters, ranks, divided.division, precision, stages)
        checker = DividedChecker(divided.graphs, holding, step, ranks)
        evaluator = Evaluator(
            context, step.passes, ranks.world, counts=ranks.speaks, in_step=partial(together, ranks)
        )  # fmt: skip
        moments = self._memory.moments
        if not self._zero:
            moments = {name: moment.part if isinstance(moment, Shard) else moment for name, moment in moments.items()}
        local = {"parameters": parameters.buffer, **moments}
        saved = WholeModelState(CanonicalState(divided.division, ranks.world, local))
        size, count = divided.division.whole.size, ranks.world.world_size
        exporter = LentExporter(
            context, divided.graphs, ranks.world, lambda rank: [share(size, rank, count)], saved.parameters
        )  # fmt: skip
        training = Training(step, loop, evaluator, checker, stages=stages)
        return GraphTrainer(
            context, parameters, moments, saved, exporter, training, graphs=divided.graphs, ranks=ranks, together=True
        )  # fmt: skip

    def _whole_parameters(self) -> WholeParameters:
        assert isinstance(self._parameters, WholeParameters)
        return self._parameters

    def _queued_parts(self) -> NcclCommunicator | None:
        """The ranks over which queued passes sum."""
        if self._divided is None or not self._work.queued:
            return None
        from ortflow.workflow.comm.nccl import NcclCommunicator

        parts = self._divided.ranks.parts
        return parts if isinstance(parts, NcclCommunicator) else None

    def _repeater(self) -> Repeater | None:
        if isinstance(self._work, HostWork) or not self.context.spec.resources.cuda_graph:
            return None
        from ortflow.workflow.trainer.queued_work import repeater

        return repeater(self._work, self._queued_parts())

    def _step(self, passes: Passes, whole_passes: WholePasses | None = None) -> StepParts:
        context, memory, inputs, thaw, work = self.context, self._memory, self._inputs, self._thaw, self._work
        reduction = self._reduction(whole_passes)
        rounded = whole_passes.graph.rounded if whole_passes is not None else None
        binder = PieceBinder(context, self._parameters.here, memory.gradients, inputs, work, rounded)
        if self._store is None:
            update: Update = WholeUpdate(context, memory, self._buffers, binder, thaw, work)
        else:
            counted = reduction.counted(memory.gradients) if isinstance(reduction, DividedReduction) else None
            update = ShareUpdate(
                context, memory, self._buffers, self._store, binder, reduction, thaw, work, counted
            )  # fmt: skip
        return StepParts(context, self._parameters, self._buffers, inputs, passes, reduction, update, thaw)

    def _reduction(self, whole_passes: WholePasses | None) -> Reduction:
        context, buffers = self.context, self._buffers
        match self._chosen.reduction:
            case "all-reduce" | "in the graph":
                return AllReduce(
                    context.replicas, buffers, whole_passes.graph.overlap if whole_passes is not None else None
                )
            case "scatter":
                return self._scatter()
            case "divided":
                assert self._divided is not None
                return DividedReduction(
                    context, self._divided.ranks, self._divided.division, self._scatter(), buffers,
                    self._whole_parameters(), self._work,
                )  # fmt: skip

    def _scatter(self) -> Scatter:
        return Scatter(
            self.context.replicas, self._buffers, self._whole_parameters().trained, sharded=self._zero > 0,
            after_each=self._added_up,
        )  # fmt: skip

    def _loop_of(self, step: StepParts) -> Loop:
        if isinstance(self._work, HostWork):
            return ImmediateLoop(step, self._work)
        from ortflow.workflow.trainer.queued_loop import QueuedLoop

        return QueuedLoop(step, self._work)

    def _precision(self, passes: Passes) -> PrecisionDifference | None:
        """What compares precisions; None on CPUs, which have one."""
        if isinstance(self._work, HostWork):
            return None
        from ortflow.workflow.trainer.check.precision_difference import PrecisionDifference

        return PrecisionDifference(self.context, passes, self._work.loss_scale)
