"""The graphs of a step on a GPU, bound to its memory, and what is captured of them. Base of `queued`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device import HALF_PRECISIONS, Buffer
from ortflow.workflow.device.capture import Agreement, Repeated
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.fusion.buckets import TOKEN
from ortflow.workflow.fusion.rounded import reading_rounded
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.after_step import statistics_graph
from ortflow.workflow.optim.gradient import FACTOR
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer.bound_graphs import TAIL
from ortflow.workflow.trainer.device_scale import DeviceScale
from ortflow.workflow.trainer.graph import GraphTrainer
from ortflow.workflow.trainer.loss_scale import loss_scale_of, unit_of
from ortflow.workflow.trainer.overlap import Overlap, overlapped
from ortflow.workflow.trainer.rounded import Rounded

SCALE, NORM, USEFUL = TAIL - 3, TAIL - 2, TAIL - 1
"""Elements of the tail that are filled after the all-reduce: the loss scale, and see `queued_gradient_graph`."""


class QueuedGraphs(GraphTrainer):
    """See the module."""

    _gradients: CudaBuffer
    _rate: CudaBuffer
    rounded: Rounded | None = None
    """Parameters in 16 bits, if the training graph reads them so."""
    _scratch: CudaBuffer | None
    _statistics: CudaBuffer
    _sums: CudaBuffer
    _tail: CudaBuffer
    _update_number: CudaBuffer

    def _open_for_training(self) -> None:
        device = self._sessions.device
        assert isinstance(device, CudaDevice)
        self._device = device
        self._noted: set[str] = set()
        """Lines that the log has about captured work."""
        rows = self._spec.data.micro_batch
        self._loss_scale = DeviceScale(device, unit_of(self._graphs.inputs, rows, self._graphs.elements(rows)))
        self._factor = self._numbers([math.nan])
        clip = self._spec.train.clip_norm
        self._max_norm = self._numbers([math.inf if clip is None else clip])
        super()._open_for_training()
        if self._scales_loss():
            self._loss_scale.set(loss_scale_of(self._spec.train.loss_scale))
        state = self._here.slice(*self._state_span)
        assert isinstance(state, CudaBuffer)
        self._after_step = self._bind_after_step(state)

    def _scales_loss(self) -> bool:
        """Whether the gradients of a micro-batch are multiplied by a loss scale."""
        return LOSS_SCALE in self._first.inputs

    def _skips_cleanly(self) -> bool:
        """Whether a step whose gradient is unusable leaves nothing to the next one. Scaling in place leaves NaN in the
        gradients' padding, which no pass writes and every norm reads, until the host clears it.
        """
        return FACTOR in self._scaling.outputs

    def _open_train(self) -> onnxruntime.InferenceSession:
        """One that reads parameters in 16 bits; with several ranks, that sums the gradients while it computes them."""
        self._overlap: Overlap | None = None
        form = self._sessions.form_of(self._train_path)
        changes = self._device.precision in HALF_PRECISIONS or isinstance(self._comm, NcclCommunicator)
        # Under ZeRO, in a divided model and with off-loading, the gradient is summed and applied otherwise.
        if form is None or not changes or not self._spec.holds_whole:
            return super()._open_train()
        found, model = None, self._with_rounded(onnx.load(form))
        if self._spec.accumulation == 1 and self._train_path == self._graphs.train:
            assert isinstance(self._sync, CudaBuffer)
            elements = self._graphs.elements(self._spec.data.micro_batch)
            found = overlapped(self._sessions, self._comm, model, self.index, elements, self._sync)
        if found is None:
            return self._sessions.open(model.SerializeToString())
        operators = self._sessions.operators
        assert operators is not None
        self._overlap = found.sums
        operators.on_bucket, operators.on_rows = self._overlap.ready, self._overlap.rows
        self._sum_token = self._device.allocate(1, np.float32)
        if self._comm.rank == 0:
            self._report.note(found.note)
        return self._sessions.open(found.content)

    def _with_rounded(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A training graph that reads parameters in 16 bits if it rounds any."""
        trained = [entry.name for entry in self.index if entry.end <= self.index.trained]
        reading, inputs = reading_rounded(model, trained)
        kinds = {value.type.tensor_type.elem_type for value in reading.graph.input if value.name in inputs}
        if len(kinds) != 1:
            return model
        parameters = self._parameters.slice(0, self.index.trained)
        assert isinstance(parameters, CudaBuffer)
        self.rounded = Rounded(self._sessions, parameters, kinds.pop(), inputs)
        return reading

    def _numbers(self, values: Sequence[float]) -> CudaBuffer:
        buffer = self._device.allocate(len(values), np.float32)
        buffer.write(np.array(values, np.float32))
        return buffer

    def _in_tail(self, place: int) -> CudaBuffer:
        """One number of the tail."""
        return self._tail.slice(place, place + 1)

    def _bind_training(self, session: onnxruntime.InferenceSession, gradients: Any) -> Binding:
        binding = super()._bind_training(session, gradients)
        binding.read_from(LOSS_SCALE, self._loss_scale.factor, (1,))
        if TOKEN in binding.outputs:
            binding.write_to(TOKEN, self._sum_token, (1,))
        if self.rounded is not None:
            self.rounded.bind_inputs(binding, self.index)
        return binding

    def _bind_scaling(self) -> Binding:
        scaling, shape = self._bind_factor(self._sessions.open_fastest(self._graphs.gradient)), (self._gradients.count,)
        scaling.read_from("gradients", self._gradients, shape)
        if FACTOR not in scaling.outputs:
            scaling.write_to("gradients.out", self._gradients, shape)
        return scaling

    def _bind_factor(self, session: onnxruntime.InferenceSession) -> Binding:
        """A `queued_gradient_graph`, bound to all but the gradients."""
        scaling = Binding(session, self._device)
        for place, name in enumerate(("loss", "weight")):
            scaling.read_from(name, self._in_tail(place), (1,))
        scaling.read_from("loss_scale", self._loss_scale.factor, (1,))
        scaling.read_from("max_norm", self._max_norm, (1,))
        if FACTOR in scaling.outputs:
            scaling.write_to(FACTOR, self._factor, (1,))
        for place, name in ((NORM, "norm"), (USEFUL, "useful")):
            scaling.write_to(name, self._in_tail(place), (1,))
        return scaling

    def _bind_after_step(self, state: CudaBuffer) -> list[Callable[[], None]]:
        """What follows from whether a step counts: the running statistics, and the next loss scale."""

        def opened(model: onnx.ModelProto) -> Binding:
            form = scalars_in_one(model)[0] if self._sessions.operators is not None else model
            return Binding(self._sessions.open(form.SerializeToString()), self._device)

        found = []
        if state.count:
            statistics, shape = opened(statistics_graph(self._comm.world_size)), (state.count,)
            statistics.read_from("statistics", self._statistics, shape)
            statistics.read_from("state", state, shape)
            statistics.read_from("useful", self._in_tail(USEFUL), (1,))
            statistics.write_to("state.out", state, shape)
            found.append(self._repeated("the change of the running statistics", statistics.run))
        if self._loss_scale.dynamic:
            sums = {"loss": self._in_tail(0), "weight": self._in_tail(1), "useful": self._in_tail(USEFUL)}
            found.append(self._repeated("the change of the loss scale", self._loss_scale.adapted(opened, sums).run))
        return found

    def _bind_pieces(
        self,
        session: onnxruntime.InferenceSession,
        cuts: Sequence[Segment],
        gradients: Buffer | Shard,
        moments_: Mapping[str, Buffer | Shard] | None = None,
    ) -> Binding:
        update = super()._bind_pieces(session, cuts, gradients, moments_)
        update.read_from(FACTOR, self._factor, (1,))
        if self.rounded is not None:
            self.rounded.bind_update(update, cuts)
        return update

    def _repeated(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        return self._captured(name, run).run

    def _captured(
        self,
        name: str,
        run: Callable[[], None],
        obstacle: str = "",
        agreement: Agreement | None = None,
        *,
        deferred: bool = False,
    ) -> Repeated:
        """Work that is captured as a CUDA graph, unless the run file forbids it or there is an obstacle.

        The few passes that a check computes in fp32 are not. The log has each line once, whatever the number of works
        of a name.
        """

        def note(line: str) -> None:
            if self._comm.rank == 0 and line not in self._noted:
                self._noted.add(line)
                self._report.note(line)

        wanted = self._spec.resources.cuda_graph and self._sessions.device is self._device
        return Repeated(
            self._device, name, run, note, obstacle, wanted=wanted, agreement=agreement, deferred=deferred
        )  # fmt: skip
