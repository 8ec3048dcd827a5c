"""The trainer on a GPU: a step is queued as a whole, and the host waits once, for its loss.

Sums, scaling, the check whether the gradient is finite, the update, and what follows from the check stay on the device;
work that repeats on the same memory is captured as CUDA graphs. While the host waits for a loss, the passes of the next
step are queued already. Opened by `builder` in place of `GraphTrainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.algorithms import PURPOSE, choices
from ortflow.workflow.device import HALF_PRECISIONS, Buffer
from ortflow.workflow.device.capture import Agreement, Repeated
from ortflow.workflow.device.cuda import CudaBuffer, CudaDevice
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import TOKEN
from ortflow.workflow.fusion.rounded import reading_rounded
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.graph.types import LOSS_SCALE
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.after_step import statistics_graph
from ortflow.workflow.optim.gradient import FACTOR
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.sessions.session import Binding
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.device_scale import DeviceScale
from ortflow.workflow.trainer.graph import CONTROL_VALUES, TAIL, GraphTrainer, fault_in
from ortflow.workflow.trainer.loss_scale import loss_scale_of, unit_of
from ortflow.workflow.trainer.obstacles import copied_by, draw_alike, obstacle_in
from ortflow.workflow.trainer.overlap import Overlap, OverRanks, overlapped
from ortflow.workflow.trainer.precision_check import compare
from ortflow.workflow.trainer.rounded import Rounded

if TYPE_CHECKING:
    from ortflow.workflow.trainer.checked_part import CheckedPart

SCALE, NORM, USEFUL = TAIL - 3, TAIL - 2, TAIL - 1
"""Elements of the tail that are filled after the all-reduce: the loss scale, and see `queued_gradient_graph`."""


class QueuedTrainer(GraphTrainer):
    """See the module."""

    prefetches = True
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
        self._loss_scale = DeviceScale(device, unit_of(self._graphs.inputs, self._spec.data.micro_batch))
        self._factor = self._numbers([math.nan])
        clip = self._spec.train.clip_norm
        self._max_norm = self._numbers([math.inf if clip is None else clip])
        super()._open_for_training()
        self.begins, self._begun = self._skips_cleanly(), False
        if self._scales_loss():
            self._loss_scale.set(loss_scale_of(self._spec.train.loss_scale))
        state = self._here.slice(*self._state_span)
        assert isinstance(state, CudaBuffer)
        self._settled = self._bind_settled(state)
        self._given = device.allocate(TAIL, np.float32)
        self._loss = self._tail.slice(0, 2)
        self._result = device.readback(self._tail)
        device.blas()  # created here so that no capture has to
        choices().keep_in(self._graphs.root / PURPOSE)
        self._repeat()

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
            scaling.read_from(name, self._tail.slice(place, place + 1), (1,))
        scaling.read_from("loss_scale", self._loss_scale.factor, (1,))
        scaling.read_from("max_norm", self._max_norm, (1,))
        if FACTOR in scaling.outputs:
            scaling.write_to(FACTOR, self._factor, (1,))
        for place, name in ((NORM, "norm"), (USEFUL, "useful")):
            scaling.write_to(name, self._tail.slice(place, place + 1), (1,))
        return scaling

    def _bind_settled(self, state: CudaBuffer) -> list[Callable[[], None]]:
        """What follows from whether a step counts: the running statistics, and the next loss scale."""

        def opened(model: onnx.ModelProto) -> Binding:
            form = scalars_in_one(model)[0] if self._sessions.operators is not None else model
            return Binding(self._sessions.open(form.SerializeToString()), self._device)

        found = []
        if state.count:
            statistics, shape = opened(statistics_graph(self._comm.world_size)), (state.count,)
            statistics.read_from("statistics", self._statistics, shape)
            statistics.read_from("state", state, shape)
            statistics.read_from("useful", self._tail.slice(USEFUL, USEFUL + 1), (1,))
            statistics.write_to("state.out", state, shape)
            found.append(self._repeated("the change of the running statistics", statistics.run))
        if self._loss_scale.dynamic:
            places = {"loss": 0, "weight": 1, "useful": USEFUL}
            sums = {name: self._tail.slice(place, place + 1) for name, place in places.items()}
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

    def _repeat(self) -> None:
        """The passes over micro-batches and the scaling, as work that is queued repeatedly."""
        self._first.prefetches = self._further.prefetches = True
        asked = self._spec.resources.cuda_graph
        drawn = obstacle_in(self._sessions.fastest_form_of(self._graphs.train)) if asked else ""
        drawn = copied_by(self._first) or drawn
        agreement = self._agreement()
        self._first_run = self._captured("a micro-batch", self._run_first, drawn, agreement)
        self._further_run = self._captured("another micro-batch", self._run_further, drawn, agreement)
        self._scale_gradient = self._repeated("the scaling of the gradient", self._scaling.run)

    def _agreement(self) -> Agreement | None:
        """The ranks whose passes contain sums over all of them; None if passes have none."""
        if self._overlap is None:
            return None
        assert isinstance(self._comm, NcclCommunicator)
        return OverRanks(self._comm)

    def _run_first(self) -> None:
        # Running statistics are updated by each micro-batch, as in PyTorch.
        self._running.copy_from(self._statistics)
        if self._overlap is not None:
            self._overlap.begin()
        self._first.run()
        self._loss.add(self._sums)
        if self._overlap is not None:
            self._overlap.finish()

    def _run_further(self) -> None:
        self._running.copy_from(self._statistics)
        self._further.run()
        assert self._scratch is not None
        self._gradients.add(self._scratch)
        self._loss.add(self._sums)

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        """See the protocol. Queues everything, then waits for the loss while the update continues."""
        if not self._begun:
            self.begin(batches, seeds=seeds, control_values=control_values)
        self._begun = False
        self._queue_scaling()
        if self._loss_scale.exists:
            self._tail.slice(SCALE, SCALE + 1).copy_from(self._loss_scale.factor)
        self._result.queue()
        self._rate.send(np.array([learning_rate], np.float32))
        self._update_number.send(np.array([update], np.int64))
        self.before_update()
        self._apply()
        for settle in self._settled:
            settle()
        self._device.settle()
        self.before_wait()
        outcome = self._outcome(self._wait(), len(control_values))
        if outcome.skipped is not None and not self.begins:
            self._forget_gradients()
        return outcome

    def begin(self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """See the protocol. Queues the sums over the ranks, too."""
        tail = np.zeros(TAIL, np.float32)
        tail[2] = sum(batch.count for batch in batches)
        tail[CONTROL_VALUES : CONTROL_VALUES + len(control_values)] = control_values
        self._given.send(tail)
        self._tail.copy_from(self._given)
        self._accumulate(batches, seeds)
        self._sum_over_ranks()
        self._begun = True

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """See the protocol. Further micro-batches are copied while the first one is computed."""
        first = next((batch for batch in batches if batch.count), None)
        for name, array in first.arrays.items() if first is not None else ():
            self._first.prefetch(name, array)

    def _forward_and_backward(self, batch: MicroBatch, seed: int, *, fresh: bool = True) -> npt.NDArray[np.float32]:
        """See GraphTrainer. Only queues: the sums stay on the device, and the samples are in the tail already."""
        binding, run = (self._first, self._first_run) if fresh else (self._further, self._further_run)
        self._feed(binding, batch, seed)
        onnxruntime.set_seed(seed)
        self._refresh()
        run.run(binding.fed)
        return np.zeros(TAIL, np.float32)

    def _refresh(self) -> None:
        """Round parameters again that something but the update has written."""
        if self.rounded is not None:
            self.rounded.refresh()

    def _apply(self) -> None:
        super()._apply()
        if self.rounded is not None:
            self.rounded.updated()

    def _without_samples(self) -> None:
        super()._without_samples()
        self._first_run.skip()
        if self._overlap is not None:
            self._overlap.finish()

    def _sum_over_ranks(self) -> None:
        if self._overlap is None:
            super()._sum_over_ranks()
        else:
            self._overlap.watch()

    def _queue_scaling(self) -> None:
        """Norm, factor, and whether the gradient is usable."""
        self._scale_gradient()

    def _wait(self) -> npt.NDArray[np.float32]:
        """The tail after scaling."""
        return self._result.read()

    def _outcome(self, tail: npt.NDArray[np.float32], control_values: int) -> StepOutcome:
        loss_sum, weight, samples = (float(value) for value in tail[:CONTROL_VALUES])
        summed, overflow = tail[CONTROL_VALUES : CONTROL_VALUES + control_values].copy(), False
        if weight <= 0:
            loss = norm = math.nan
            skipped: str | None = "no label of the batch counts"
        else:
            loss, norm = loss_sum / weight, float(tail[NORM])
            skipped = fault_in(loss, norm)
            if self._loss_scale.exists and math.isfinite(loss):
                overflow, skipped = self._loss_scale.follow(float(tail[SCALE]), skipped)
        if (skipped is None) != bool(tail[USEFUL]):
            raise OrtflowError(f"the GPU and the host disagree whether a gradient of norm {norm} is usable")
        return StepOutcome(loss, norm, round(samples), summed, skipped, overflow)

    def numbers(self) -> Mapping[str, float]:
        """The loss scale's state."""
        return self._loss_scale.numbers()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """See the protocol."""
        self._loss_scale.restore(numbers)

    def _compare_precision(self, part: CheckedPart, exact: Binding, batch: MicroBatch, seed: int) -> None:
        """See GraphTrainer. Graphs that draw different random numbers are not compared."""
        sessions = self._sessions
        if not draw_alike(each.fastest_form_of(self._graphs.train) for each in (sessions, sessions.exact())):
            return

        def gradient(binding: Binding) -> npt.NDArray[np.float32]:
            with part.passing():
                self._feed(binding, batch, seed)
                binding.run()
            return part.gradients.read()

        def finite(found: npt.NDArray[np.float32]) -> bool:
            return bool(part.totals(np.array([float(not np.isfinite(found).all())]))[0] == 0)

        expected = gradient(exact)
        self._refresh()
        warning = self._difference(expected, lambda: gradient(self._first), finite, part)
        if warning and (part.ranks == 1 or self._comm.rank == 0):
            self._report.warn(warning)

    def _difference(
        self,
        exact: npt.NDArray[np.float32],
        gradient: Callable[[], npt.NDArray[np.float32]],
        finite: Callable[[npt.NDArray[np.float32]], bool],
        part: CheckedPart,
    ) -> str:
        """See `compare`; the loss scale is the same afterwards. `gradient` computes that of training."""
        with self._loss_scale.varied() as set_to:

            def at(scale: float) -> npt.NDArray[np.float32]:
                set_to(scale)
                return gradient()

            return compare(exact, at, finite, part, self._spec.train.precision, self._loss_scale.exists)

    def give_memory_back(self) -> None:
        """See the protocol."""
        super().give_memory_back()
        # Scaling a gradient that no step has computed makes it NaN, and no step writes the padding.
        self._gradients.fill(0)

    def end_training(self) -> None:
        """See the protocol."""
        if self._overlap is not None and (operators := self._sessions.operators) is not None:
            operators.on_bucket = operators.on_rows = None
            self._overlap.close()
        super().end_training()
        self._overlap = self.rounded = None
        self.before_wait = lambda: None
        del self._scale_gradient, self._settled, self._loss, self._result

    def _drop_passes(self) -> None:
        super()._drop_passes()
        del self._first_run, self._further_run
