"""One attempt inside an allocation: srun (or mpirun) as a child of the batch step.

Ranks run on other nodes, so their processes are unknown here: Slurm ends them together (--kill-on-bad-exit), and
the exit status of each is read from srun's output. Signals reach them through Slurm, our requests by the stop file.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from ortflow.launchers.attempts.cause import Cause, statuses
from ortflow.launchers.slurm.mpirun_output import lost_node
from ortflow.launchers.slurm.srun_output import cancelled, first_end, never_launched, verdict
from ortflow.launchers.supervision.attempt import Child, RankCommand
from ortflow.manifests.local import MpiKind

_ABORT = re.compile(r"MPI_Abort|Fatal error in|MPI_ABORT was invoked|Abort\(\d+\)")
ABORT = 10.0
"""Seconds that srun has to end a step before it is killed itself; what is left then ends with the job."""


class StepAttempt(Child):
    """A started attempt; `poll` must be called often."""

    def __init__(self, command: RankCommand, mpirun: MpiKind | None) -> None:
        self._mpirun = mpirun
        super().__init__(command)

    def gone(self) -> Sequence[int]:
        """Ranks that were never launched."""
        # srun reports them, and waits for the others forever.
        return sorted(never_launched(self.output()))

    def statuses(self, returncode: int) -> dict[int, int]:
        """Exit status of the rank that ended first and not with 0; it ends the others too."""
        if self._mpirun is not None:
            return statuses(self._mpirun, returncode, self.output(), {})
        return first_end(self.output())

    def verdict(self, returncode: int) -> Cause | None:
        """What Slurm or mpirun reports of an end that no rank can report."""
        reason = verdict(self.output(), returncode)
        if reason is None and self._mpirun is not None:
            return lost_node(self._mpirun, self.output(), returncode)
        return reason

    def guess(self, returncode: int) -> Cause | None:
        """A cancelled step, if no rank has had MPI end them all."""
        if any(_ABORT.search(text) for text in self.ends_of_logs().values()):
            return super().guess(returncode)
        return cancelled(self.output(), returncode)

    def ask_to_leave(self) -> None:
        """Ranks have seen Slurm's signal or the stop file: there is no other way to reach them."""

    def kill(self) -> None:
        """End the step now: two interrupts make srun abort it."""
        end = time.monotonic() + ABORT
        while self._child.poll() is None and time.monotonic() < end:
            with suppress(ProcessLookupError):
                # At one interrupt srun shows the state of its tasks; at another within a second it ends them (srun(1)).
                self._child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(0.2)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
