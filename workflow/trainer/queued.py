"""The trainer on a GPU: a step is queued as a whole, and the host waits once, for its loss.

Sums, scaling, the check whether the gradient is finite, the update, and what follows from the check stay on the device;
work that repeats on the same memory is captured as CUDA graphs. While the host waits for a loss, the passes of the next
step are queued already. Opened by `builder` in place of `GraphTrainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.algorithms import PURPOSE, choices
from ortflow.workflow.device.capture import Agreement
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.bound_graphs import TAIL
from ortflow.workflow.trainer.graph import CONTROL_VALUES, fault_in
from ortflow.workflow.trainer.obstacles import copied_by, draw_alike, obstacle_in
from ortflow.workflow.trainer.overlap import OverRanks
from ortflow.workflow.trainer.precision_check import compare
from ortflow.workflow.trainer.queued_graphs import NORM, SCALE, USEFUL, QueuedGraphs

if TYPE_CHECKING:
    from ortflow.workflow.trainer.checked_part import CheckedPart


class QueuedTrainer(QueuedGraphs):
    """See the module."""

    prefetches = True

    def _open_for_training(self) -> None:
        super()._open_for_training()
        self.begins, self._begun = self._skips_cleanly(), False
        device = self._device
        self._given = device.allocate(TAIL, np.float32)
        self._loss = self._tail.slice(0, 2)
        self._result = device.readback(self._tail)
        device.blas()  # created here so that no capture has to
        choices().keep_in(self._graphs.root / PURPOSE)
        self._repeat()

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
            self._in_tail(SCALE).copy_from(self._loss_scale.factor)
        self._result.queue()
        self._rate.send(np.array([learning_rate], np.float32))
        self._update_number.send(np.array([update], np.int64))
        self.before_update()
        self._apply()
        for run in self._after_step:
            run()
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
        del self._scale_gradient, self._after_step, self._loss, self._result

    def _drop_passes(self) -> None:
        super()._drop_passes()
        del self._first_run, self._further_run
