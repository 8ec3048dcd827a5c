"""The trainer of one part of a divided model on a GPU: what `PartTrainer` does, queued as `QueuedTrainer` does it.

Opened by `divided_opening`. `queued_stage` has that of a pipeline's stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device.capture import Agreement
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.checked_part import CheckedPart
from ortflow.workflow.trainer.obstacles import draw_alike
from ortflow.workflow.trainer.overlap import OverRanks
from ortflow.workflow.trainer.part import PartTrainer
from ortflow.workflow.trainer.queued_zero import QueuedZeroTrainer


class QueuedPartTrainer(QueuedZeroTrainer, PartTrainer):
    """See the module."""

    _queues = True

    def _loss_of(self, batch: MicroBatch, seed: int) -> float:
        # The passes add to the tail on the device.
        self._tail.fill(0)
        self._pass([batch], [seed])
        return float(self._tail.read()[0])

    @contextmanager
    def exact(self) -> Iterator[None]:
        """See PartTrainer."""
        device = self._sessions.device
        with super().exact():
            if self._sessions.device is not device:
                self._repeat()
            yield
        if self._sessions.exact() is not self._sessions:
            self._repeat()

    def compare_precision(self, exact: npt.NDArray[np.float32], batch: MicroBatch, seed: int) -> None:
        """See PartTrainer. Graphs that draw different random numbers are not compared."""
        precise = self._sessions.exact() is self._sessions
        if precise or self._spec.train.precision == "tf32" or not draw_alike(self._graphs_compared()):
            return

        def finite(found: npt.NDArray[np.float32]) -> bool:
            overflows = self._sessions.device.allocate(1, np.float64)
            overflows.fill(0.0 if np.isfinite(found).all() else 1.0)
            self._ranks.replica.all_reduce(overflows)
            return bool(overflows.read()[0] == 0)

        part = CheckedPart(self.index, self._parameters, self._gradients)
        warning = self._difference(exact, lambda: self.gradient_of(batch, seed)[1].read(), finite, part)
        if warning:
            self._report.warn(warning)

    def _agreement(self) -> Agreement | None:
        parts = self._ranks.parts
        return OverRanks(parts) if isinstance(parts, NcclCommunicator) else None

    def _forward_and_backward(self, batch: MicroBatch, seed: int, *, fresh: bool = True) -> npt.NDArray[np.float32]:
        tail = super()._forward_and_backward(batch, seed, fresh=fresh)
        if isinstance(self._ranks.parts, NcclCommunicator):
            self._ranks.parts.watch()
        return tail

    def _graphs_compared(self) -> Iterable[Path]:
        """The graphs of the forward pass of all ranks of the model, in the run's precision and in fp32."""
        both = self._sessions, self._sessions.exact()
        return [sessions.fastest_form_of(self._graphs.train) for sessions in both]
