"""Requests to stop a run in a batch job: from the scheduler, by signals, from the time limit, or from a user.

A scheduler's signals have no reason. A preemption, a requeue and a time limit are followed by a restart; a
cancelled job must not be restarted, so the scheduler is queried for the reason before a decision. The signal
ahead of the time limit is sent only here, not to the ranks: the limit may have changed since the script was made.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType

from ortflow.launchers.batch.current_job import CurrentJob, Fate
from ortflow.launchers.stop import Stop, taken_over
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends ahead of the time limit: USR2 by our scripts, USR1 by those of other tools."""
SIGNALS = (signal.SIGTERM, *WARNINGS, signal.SIGINT, signal.SIGHUP)
SETTLED = 1.0
"""Seconds after a signal until the scheduler shows its reason."""
POLL = 60.0
"""Seconds between two checks of the time limit; when little is left, the scheduler's signal comes first."""
MOVED = 5.0
"""Seconds by which the end of the job must change to count as a new limit: a scheduler's times are rounded."""
EARLY = 75.0
"""Seconds by which a scheduler may send the signal ahead of the limit too early, with a margin."""
LIMIT = "time limit"
CAUSES = {
    Fate.PREEMPTED: None,
    Fate.TIME_LIMIT: "the time limit was reached",
    Fate.CANCELLED: "the job was cancelled",
}


class Limit:
    """The time limit of a job, which may change: the moment to save ahead of it, by our own clock."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead
        self._end: float | None = None
        self._lead = ahead

    def take(self, seconds_left: float | None, now: float) -> None:
        """Set the seconds that are left at the time `now`; None if there is no limit."""
        if seconds_left is None:
            return
        if self._end is None or abs(now + seconds_left - self._end) > MOVED:
            # A short job keeps half of its time for training: a lead as long as the job would leave nothing.
            self._end, self._lead = now + seconds_left, min(self._ahead, seconds_left / 2)

    def near(self, now: float) -> bool:
        """Whether it is time to save and stop."""
        return self._end is not None and now >= self._end - self._lead

    def warns(self, now: float) -> bool:
        """Whether the scheduler's signal may be the one ahead of the limit."""
        return self._end is not None and now >= self._end - self._ahead - EARLY


class JobStop(Stop):
    """Set by the scheduler's signals, by the file in the run directory, and `ahead` seconds before the time limit.

    Of a limit that leaves less than twice as much, half is kept for training. `output` returns the attempt's so far.
    """

    def __init__(
        self,
        file: Path,
        job: CurrentJob,
        ahead: float,
        output: Callable[[], str] = str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(file, clock=clock)
        self._job, self._output = job, output
        self._since = 0.0
        self._warned: signal.Signals | None = None
        self._fate: Fate | None = None
        self.limit = Limit(ahead)
        self._ask_limit()

    def _ask_limit(self) -> None:
        moment = self._clock.monotonic()
        with suppress(OrtflowError):
            self.limit.take(self._job.seconds_left(), moment)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(POLL):
            self._ask_limit()

    def check(self, *, fresh: bool = False) -> str | None:
        """The reason, after a check of file and clock."""
        if self._warned is not None and self.reason is None:
            self._heed()
        if super().check(fresh=fresh) is None and self.limit.near(self._clock.monotonic()):
            self._ask_limit()
            if self.limit.near(self._clock.monotonic()):
                self.reason, self.signalled, self._since = LIMIT, True, self._clock.monotonic()
        return self.reason

    def _heed(self) -> None:
        """Find the reason for a warning: a preemption stops the run now, the signal ahead of the limit later."""
        number, self._warned = self._warned, None
        running = self._job.fate() is Fate.RUNNING
        self._ask_limit()
        early = running and self.limit.warns(self._clock.monotonic())
        if number is not None and self.reason is None and not early:
            self.reason, self.signalled, self._since = number.name, True, self._clock.monotonic()

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good: a late signal must not kill a supervisor that the scheduler ends."""
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()
        return taken_over(self._handle, SIGNALS, for_good=True, ignored=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in WARNINGS:
            self._warned = signal.Signals(number)
        elif self.reason is None:
            self.reason, self.signalled, self._since = signal.Signals(number).name, True, self._clock.monotonic()

    def settle(self) -> str | None:
        """The reason, and whether a user requested it: a cancelled job shows it by its state."""
        super().settle()
        if self.signalled:
            self._clock.sleep(max(0.0, self._since + SETTLED - self._clock.monotonic()))
            self._fate = self._job.fate()
            if self._fate is Fate.CANCELLED:
                self.take(self._job.cancelled_by)
        return self.reason

    def other_than_preemption(self) -> str | None:
        """Why the ranks were stopped, if not by a preemption; called when they have ended."""
        if self.reason == LIMIT:
            return "the time limit is near"
        fate = self._fate or self._job.fate()
        if fate in (Fate.QUEUED, Fate.UNKNOWN):
            # Also where the scheduler does not answer now: the output shows why it has ended the ranks.
            return self._job.taken_away(self._output())
        if fate is not Fate.RUNNING:
            return CAUSES[fate]
        if self.reason is None and self.limit.warns(self._clock.monotonic()):
            return "the time limit is near"
        if self.reason is not None and not self.signalled:
            return None  # requested, as by `ortflow cancel`: the record says by whom
        if self.reason is None and self._job.repeats_signals:
            return (
                f"a signal was sent to a rank, by hand or by {self._job.scheduler} to end a step of an earlier start "
                f"of the job; {self._job.scheduler} did not preempt the job"
            )
        name = f" ({self.reason})" if self.signalled else ""
        return f"a signal was sent by hand{name}; {self._job.scheduler} did not preempt the job"
