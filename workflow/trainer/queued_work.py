"""Work that is queued on a GPU: the forms of graphs for it, and CUDA graphs of what repeats on the same memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.device.capture import Repeated
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.fusion.buckets import TOKEN
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.rounded import reading_rounded
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.fusion.update import fused_update
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.optim.after_step import statistics_graph
from ortflow.workflow.optim.gradient import FACTOR, queued_gradient_graph, square_sum_graph, square_sums_graph
from ortflow.workflow.optim.guard import GRADIENTS, guarded
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.buffers import TAIL, StepBuffers
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.device_scale import DeviceScale
from ortflow.workflow.trainer.loss_scale import loss_scale_of, unit_of
from ortflow.workflow.trainer.obstacles import copied_by, obstacle_in
from ortflow.workflow.trainer.overlap import OverRanks, overlapped
from ortflow.workflow.trainer.parameters import Parameters, WholeParameters
from ortflow.workflow.trainer.rounded import Rounded
from ortflow.workflow.trainer.stage_passes import Repeater
from ortflow.workflow.trainer.stage_slots import Repeat
from ortflow.workflow.trainer.work import Repetition, TrainGraph

SCALE, NORM, USEFUL = TAIL - 3, TAIL - 2, TAIL - 1
"""Elements of the tail that are filled after the all-reduce: the loss scale, and see `queued_gradient_graph`."""


class QueuedWork:
    """See the module."""

    queued = True
    own_kernels = False

    def __init__(self, context: StepContext, buffers: StepBuffers) -> None:
        device = context.device
        assert isinstance(device, CudaDevice)
        self.device, self._context, self._buffers = device, context, buffers
        self._noted: set[str] = set()
        """Lines that the log has about captured work."""
        graphs, rows = context.graphs, context.spec.data.micro_batch
        self.loss_scale = DeviceScale(device, unit_of(graphs.inputs, rows, graphs.elements(rows)))
        clip = context.spec.train.clip_norm
        self._factor, self._max_norm = self._number(math.nan), self._number(math.inf if clip is None else clip)
        self._sum_token = device.allocate(1, np.float32)

    def _number(self, value: float) -> CudaBuffer:
        buffer = self.device.allocate(1, np.float32)
        buffer.write(np.array([value], np.float32))
        return buffer

    def in_tail(self, place: int) -> CudaBuffer:
        """One number of the tail."""
        number = self._buffers.tail.slice(place, place + 1)
        assert isinstance(number, CudaBuffer)
        return number

    def open_train(self, sessions: Sessions, parameters: Parameters) -> TrainGraph:
        """One that reads parameters in 16 bits; with several ranks, that sums the gradients while it computes them."""
        context, ranks, sync = self._context, self._context.replicas, self._buffers.sync
        form = sessions.form_of(context.train_graph)
        changes = self.device.precision in HALF_PRECISIONS or isinstance(ranks, NcclCommunicator)
        # Under ZeRO, in a divided model and with off-loading, the gradient is summed and applied otherwise.
        if form is None or not changes or not context.spec.holds_whole:
            return TrainGraph(sessions.open_fastest(context.train_graph))
        assert isinstance(parameters, WholeParameters)
        model, rounded = self._with_rounded(onnx.load(form), parameters)
        overlap = None
        # With several micro-batches, this rank's sums are complete only behind the last one.
        if context.spec.accumulation == 1 and context.train_graph == context.graphs.train:
            assert isinstance(sync, CudaBuffer)
            elements = context.graphs.elements(context.spec.data.micro_batch)
            overlap = overlapped(sessions, ranks, model, context.index, elements, sync)
        if overlap is None:
            return TrainGraph(sessions.open(model.SerializeToString()), rounded)
        operators = sessions.operators
        assert operators is not None
        operators.on_bucket, operators.on_rows = overlap.sums.ready, overlap.sums.rows
        if ranks.rank == 0:
            context.report.note(overlap.note)
        return TrainGraph(sessions.open(overlap.content), rounded, overlap.sums)

    def _with_rounded(
        self, model: onnx.ModelProto, parameters: WholeParameters
    ) -> tuple[onnx.ModelProto, Rounded | None]:
        """A training graph that reads parameters in 16 bits if it rounds any, and those."""
        index = self._context.index
        trained = [entry.name for entry in index if entry.end <= index.trained]
        reading, inputs = reading_rounded(model, trained)
        kinds = {value.type.tensor_type.elem_type for value in reading.graph.input if value.name in inputs}
        if len(kinds) != 1:
            return model, None
        buffer = parameters.trained
        assert isinstance(buffer, CudaBuffer)
        return reading, Rounded(self._context.sessions, buffer, kinds.pop(), inputs)

    def tie_training(self, binding: Binding) -> None:
        """See the protocol."""
        binding.read_from(LOSS_SCALE, self.loss_scale.factor, (1,))
        if TOKEN in binding.outputs:
            binding.write_to(TOKEN, self._sum_token, (1,))

    def tie_update(self, binding: Binding, cuts: Sequence[Segment]) -> None:
        """See the protocol."""
        binding.read_from(FACTOR, self._factor, (1,))

    def tie_scaling(self, scaling: Binding) -> None:
        """See the protocol; a `queued_gradient_graph`."""
        for place, name in enumerate(("loss", "weight")):
            scaling.read_from(name, self.in_tail(place), (1,))
        scaling.read_from("loss_scale", self.loss_scale.factor, (1,))
        scaling.read_from("max_norm", self._max_norm, (1,))
        if FACTOR in scaling.outputs:
            scaling.write_to(FACTOR, self._factor, (1,))
        for place, name in ((NORM, "norm"), (USEFUL, "useful")):
            scaling.write_to(name, self.in_tail(place), (1,))

    def shared_scaling(self) -> onnx.ModelProto:
        """See the protocol."""
        return queued_gradient_graph(shared=True)

    def form_of(self, model: onnx.ModelProto, change: str = GRADIENTS) -> onnx.ModelProto:
        """See the protocol. What is queued runs in any case, and must then change nothing."""
        form = guarded(compose(model), multiplied=True, change=change)
        if self._context.sessions.operators is not None:
            fused, fusions = fuse(form)
            form = fused if fusions else form
        return form

    def whole_form_of(self, model: onnx.ModelProto, *, multiplied: bool) -> onnx.ModelProto:
        """See the protocol."""
        composed = compose(model)
        if self._context.sessions.operators is not None:
            fused, fusions = fused_update(composed, self.device.precision, multiplied=multiplied)
            if fusions:
                return fused
        return guarded(composed, multiplied=multiplied)

    def squares_graph(self, pieces: int | None = None) -> onnx.ModelProto:
        """See the protocol."""
        fused = self._context.sessions.operators is not None
        return square_sum_graph(fused=fused) if pieces is None else square_sums_graph(pieces, fused=fused)

    def start_loss_scale(self) -> None:
        """Multiply the gradients of micro-batches, as the run file says."""
        self.loss_scale.set(loss_scale_of(self._context.spec.train.loss_scale))

    def after_step(self, state: CudaBuffer) -> list[Callable[[], None]]:
        """What follows from whether a step counts: the running statistics, and the next loss scale."""
        context = self._context

        def opened(model: onnx.ModelProto) -> Binding:
            form = scalars_in_one(model)[0] if context.sessions.operators is not None else model
            return Binding(context.sessions.open(form.SerializeToString()), self.device)

        runs: list[Callable[[], None]] = []
        if state.count:
            statistics, shape = opened(statistics_graph(context.replicas.world_size)), (state.count,)
            statistics.read_from("statistics", self._buffers.statistics, shape)
            statistics.read_from("state", state, shape)
            statistics.read_from("useful", self.in_tail(USEFUL), (1,))
            statistics.write_to("state.out", state, shape)
            runs.append(self.repeat("the change of the running statistics", statistics.run).run)
        if self.loss_scale.dynamic:
            sums = {"loss": self.in_tail(0), "weight": self.in_tail(1), "useful": self.in_tail(USEFUL)}
            runs.append(self.repeat("the change of the loss scale", self.loss_scale.adapted(opened, sums).run).run)
        return runs

    def obstacle(self, sessions: Sessions, binding: Binding, graphs: Sequence[Path]) -> str:
        """See the protocol."""
        forms = graphs if self._context.spec.resources.cuda_graph else ()
        obstacle = next(filter(None, (obstacle_in(sessions.fastest_form_of(graph)) for graph in forms)), "")
        return copied_by(binding) or obstacle

    def repeat(self, name: str, run: Callable[[], None], passes: Repetition | None = None) -> Repeated:
        """See the protocol. Captured as a CUDA graph, unless the run file forbids it or there is an obstacle.

        The few passes that a check computes in fp32 are not. The log has each line once, whatever the number of works
        of a name.
        """
        passes = passes or Repetition(self._context.sessions, "", None)

        def note(line: str) -> None:
            if self._context.replicas.rank == 0 and line not in self._noted:
                self._noted.add(line)
                self._context.report.note(line)

        capture = self._context.spec.resources.cuda_graph and passes.sessions.device is self.device
        agreement = OverRanks(passes.over) if isinstance(passes.over, NcclCommunicator) else None
        return Repeated(
            self.device, name, run, note, passes.obstacle, wanted=capture, agreement=agreement, deferred=passes.deferred
        )  # fmt: skip


def repeater(work: QueuedWork, parts: NcclCommunicator | None) -> Repeater:
    """Makes work that a GPU repeats of the passes of stages, which `parts` sum in."""

    def for_graphs(sessions: Sessions, graphs: Sequence[Path]) -> Repeat:
        forms = (obstacle_in(sessions.fastest_form_of(graph)) for graph in graphs)
        drawn = next(filter(None, forms), "")

        def repeat(name: str, run: Callable[[], None], binding: Binding) -> Repeated:
            repetition = Repetition(sessions, copied_by(binding) or drawn, parts, deferred=True)
            return work.repeat(name, run, repetition)

        return repeat

    return for_graphs
