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
from ortflow.workflow.trainer.overlap import OverRanks
from ortflow.workflow.trainer.part import PartTrainer
from ortflow.workflow.trainer.precision_check import apart
from ortflow.workflow.trainer.queued import COMPARED_SCALES, draw_alike
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
        before = self._scale.read()
        for scale in COMPARED_SCALES if self._scaler is not None else COMPARED_SCALES[-1:]:
            self._scale.send(np.array([scale * self._unit], np.float32))
            found = self.gradient_of(batch, seed)[1].read()
            useful = self._sessions.device.allocate(1, np.float64)
            useful.fill(0.0 if np.isfinite(found).all() else 1.0)
            self._ranks.replica.all_reduce(useful)
            if useful.read()[0] == 0:
                break
        self._scale.send(before)
        worst = apart(exact, found, CheckedPart(self.index, self._parameters, self._gradients))
        if worst is not None:
            difference, name = worst
            self._report.warn(
                f"the gradient of {name!r} in {self._spec.train.precision} differs from the one in fp32 by "
                f"{difference:.0%}; use train.precision: fp32, and report the model to ortflow"
            )

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
