"""Who wants a run in a Slurm job to stop: Slurm, by signals to the batch step, or a person.

Slurm's SIGTERM says nothing of what it is for. A preemption, a requeue and a time limit are followed by a restart; a
job that somebody has cancelled must stay away, so Slurm is asked which it is before anything is decided.
"""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

from ortflow.launchers.slurm.requeue import Fate, JobOfOurs, fate, seconds_left
from ortflow.launchers.stop import Stop, taken_over

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
SETTLED = 1.0
"""Seconds after a signal until `scontrol show job` tells what it was for."""


class JobStop(Stop):
    """Set by Slurm's signals, by the file in the run directory, and `ahead` seconds before the time limit.

    Slurm's own signal ahead of the limit is missed where it comes before the ranks do, and cannot be moved any more
    when an administrator gives the job more time.
    """

    def __init__(self, file: Path, job: JobOfOurs, ahead: float) -> None:
        super().__init__(file)
        self._job, self._ahead = job, ahead
        self._since = 0.0
        self._deadline = self._find_deadline()

    def _find_deadline(self) -> float | None:
        left = seconds_left(self._job)
        return None if left is None else time.monotonic() + left - self._ahead

    def look(self, *, at_once: bool = False) -> str | None:
        """The reason, after a look at file and clock."""
        if super().look(at_once=at_once) is None and self._deadline and time.monotonic() >= self._deadline:
            self._deadline = self._find_deadline()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.reason, self.signalled, self._since = "time limit", True, time.monotonic()
        return self.reason

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good: a batch step that Slurm takes away must not die of a late one."""
        return taken_over(self._handle, SIGNALS, for_good=True, ignored=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason, self.signalled, self._since = signal.Signals(number).name, True, time.monotonic()

    def settle(self) -> str | None:
        """The reason, and whether it is a person's: a cancelled job says so by its state."""
        super().settle()
        if self.signalled:
            time.sleep(max(0.0, self._since + SETTLED - time.monotonic()))
            if fate(self._job) is Fate.CANCELLED:
                self.take("scancel")
        return self.reason
