"""One step on a GPU, queued as a whole: the host waits once, for its loss.

Sums, scaling, the check whether the gradient is finite, the update, and what follows from the check stay on the device;
work that repeats on the same memory is captured as CUDA graphs. While the host waits for a loss, the passes of the next
step are queued already. Collectives are queued between captured work, so that it does not matter which ranks have
captured what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.cuda.algorithms import PURPOSE, choices
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.buffers import CONTROL_VALUES, TAIL
from ortflow.workflow.trainer.loop import StepParts, StepRequest, fault_in, tail_of
from ortflow.workflow.trainer.queued_work import NORM, SCALE, USEFUL, QueuedWork
from ortflow.workflow.trainer_protocol.capabilities import StoringNumbers


class QueuedLoop:
    """See the module."""

    def __init__(self, parts: StepParts, work: QueuedWork) -> None:
        device, tail = work.device, parts.buffers.tail
        self._parts, self._work, self._device = parts, work, device
        self.stored: StoringNumbers = _Stored(work.loss_scale, parts.thaw)
        if parts.passes.graphs.scales_loss():
            work.start_loss_scale()
        state = parts.state()
        assert isinstance(tail, CudaBuffer)
        assert isinstance(state, CudaBuffer)
        self._tail = tail
        self._after_step = work.after_step(state)
        self.begins, self._begun = parts.update.skips_cleanly, False
        self._given = device.allocate(TAIL, np.float32)
        self._result = device.readback(tail)
        device.blas()  # created here so that no capture has to
        # In the folder of the run: other algorithms of cuBLAS or cuDNN in a later attempt would give other bits.
        choices().keep_in(parts.context.graphs.root / PURPOSE)
        self._scale = work.repeat("the scaling of the gradient", parts.update.scaling.run).run

    def step(self, request: StepRequest) -> StepOutcome:
        """See the protocol. Queues everything, then waits for the loss while the update continues."""
        parts, loss_scale = self._parts, self._work.loss_scale
        if not self._begun:
            self.begin(request.batches, request.seeds, request.control_values)
        self._begun = False
        parts.thaw.silence()
        parts.update.sum_squares()
        self._scale()
        if loss_scale.exists:
            self._work.in_tail(SCALE).copy_from(loss_scale.factor)
        self._result.queue()
        for buffer, number in parts.numbers(request):
            assert isinstance(buffer, CudaBuffer)
            buffer.send(number)
        request.before_update()
        parts.apply()
        for run in self._after_step:
            run()
        self._device.settle()
        request.before_wait()
        outcome = self._outcome(self._result.read(), len(request.control_values))
        if outcome.skipped is None:
            parts.thaw.count()
        elif not self.begins:
            parts.update.forget_gradients()
        return outcome

    def begin(self, batches: Sequence[MicroBatch], seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """See the protocol. Queues the sums over the ranks, too."""
        self._parts.update.begin()
        self._given.send(tail_of(batches, control_values))
        self._tail.copy_from(self._given)
        self._parts.accumulate(batches, seeds)
        self._parts.reduction.sum_rest()
        self._begun = True

    def _outcome(self, tail: npt.NDArray[np.float32], control_values: int) -> StepOutcome:
        """From the tail after scaling."""
        loss_sum, weight, samples = (float(value) for value in tail[:CONTROL_VALUES])
        summed, overflow = tail[CONTROL_VALUES : CONTROL_VALUES + control_values].copy(), False
        if weight <= 0:
            loss = norm = math.nan
            skipped: str | None = "no label of the batch counts"
        else:
            loss, norm = loss_sum / weight, float(tail[NORM])
            skipped = fault_in(loss, norm)
            if self._work.loss_scale.exists and math.isfinite(loss):
                overflow, skipped = self._work.loss_scale.follow(float(tail[SCALE]), skipped)
        if (skipped is None) != bool(tail[USEFUL]):
            raise OrtflowError(f"the GPU and the host disagree whether a gradient of norm {norm} is usable")
        return StepOutcome(loss, norm, round(samples), summed, skipped, overflow)


@dataclass(frozen=True)
class _Stored(StoringNumbers):
    """The numbers of both."""

    scale: StoringNumbers
    thaw: StoringNumbers

    def numbers(self) -> Mapping[str, float]:
        return {**self.scale.numbers(), **self.thaw.numbers()}

    def restore(self, numbers: Mapping[str, float]) -> None:
        self.scale.restore(numbers)
        self.thaw.restore(numbers)
