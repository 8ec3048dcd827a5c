"""Who wants a run in a Slurm job to stop: Slurm, by signals to the batch step, the time limit, or a person.

Slurm's signals say nothing of what they are for. A preemption, a requeue and a time limit are followed by a restart; a
job that somebody has cancelled must stay away, so Slurm is asked which it is before anything is decided. The signal
ahead of the time limit comes here alone, not to the ranks: the limit may have been changed since the script was made.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

from ortflow.launchers.slurm.requeue import Fate, JobOfOurs, fate, seconds_left
from ortflow.launchers.slurm.words import taken_away
from ortflow.launchers.stop import Stop, taken_over
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
SETTLED = 1.0
"""Seconds after a signal until `scontrol show job` tells what it was for."""
LOOK = 60.0
"""Seconds between two looks at the time limit; when little is left, Slurm's signal comes before."""
MOVED = 5.0
"""Seconds by which the end of the job has to move for another limit: what Slurm says is rounded."""
EARLY = 75.0
"""Seconds by which Slurm may send the signal ahead of the limit too early, and some."""
LIMIT = "time limit"
WORDS = {
    Fate.PREEMPTED: None,
    Fate.UNKNOWN: None,
    Fate.TIME_LIMIT: "the time limit was reached",
    Fate.CANCELLED: "the job was cancelled",
}


class Limit:
    """The time limit of a job, whenever somebody changes it: the moment to save ahead of it, by our own clock."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead
        self._end: float | None = None
        self._lead = ahead

    def take(self, left: float | None, now: float) -> None:
        """So many seconds are left at the moment `now`; None where there is no limit, or nobody answers."""
        if left is None:
            return
        if self._end is None or abs(now + left - self._end) > MOVED:
            # Of a short life half is for training: a lead as long as the life would leave nothing.
            self._end, self._lead = now + left, min(self._ahead, left / 2)

    def near(self, now: float) -> bool:
        """Whether it is time to save and leave."""
        return self._end is not None and now >= self._end - self._lead

    def warns(self, now: float) -> bool:
        """Whether Slurm's signal may be that ahead of the limit."""
        return self._end is not None and now >= self._end - self._ahead - EARLY


class JobStop(Stop):
    """Set by Slurm's signals, by the file in the run directory, and `ahead` seconds before the time limit.

    Of a limit that leaves less than twice as much, half is kept for training. `words`: what srun has said so far.
    """

    def __init__(
        self,
        file: Path,
        job: JobOfOurs,
        ahead: float,
        words: Callable[[], str] = str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(file, clock=clock)
        self._job, self._words = job, words
        self._since = 0.0
        self._warned: signal.Signals | None = None
        self._fate: Fate | None = None
        self.limit = Limit(ahead)
        self._ask_limit()

    def _ask_limit(self) -> None:
        moment = self._clock.monotonic()
        self.limit.take(seconds_left(self._job), moment)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK):
            self._ask_limit()

    def look(self, *, at_once: bool = False) -> str | None:
        """The reason, after a look at file and clock."""
        if self._warned is not None and self.reason is None:
            self._heed()
        if super().look(at_once=at_once) is None and self.limit.near(self._clock.monotonic()):
            self._ask_limit()
            if self.limit.near(self._clock.monotonic()):
                self.reason, self.signalled, self._since = LIMIT, True, self._clock.monotonic()
        return self.reason

    def _heed(self) -> None:
        """Find out what a USR2 is for: ahead of the limit it is not yet time to leave, of a preemption it is."""
        number, self._warned = self._warned, None
        running = fate(self._job) is Fate.RUNNING
        self._ask_limit()
        early = running and self.limit.warns(self._clock.monotonic())
        if number is not None and self.reason is None and not early:
            self.reason, self.signalled, self._since = number.name, True, self._clock.monotonic()

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good: a batch step that Slurm takes away must not die of a late one."""
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()
        return taken_over(self._handle, SIGNALS, for_good=True, ignored=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self._warned = signal.SIGUSR2
        elif self.reason is None:
            self.reason, self.signalled, self._since = signal.Signals(number).name, True, self._clock.monotonic()

    def settle(self) -> str | None:
        """The reason, and whether it is a person's: a cancelled job says so by its state."""
        super().settle()
        if self.signalled:
            self._clock.sleep(max(0.0, self._since + SETTLED - self._clock.monotonic()))
            self._fate = fate(self._job)
            if self._fate is Fate.CANCELLED:
                self.take("scancel")
        return self.reason

    def other_than_preemption(self) -> str | None:
        """Why ranks were made to leave, where no preemption did it; asked for when they have left."""
        if self.reason == LIMIT:
            return "the time limit is near"
        found = self._fate or fate(self._job)
        if found is Fate.QUEUED:
            return taken_away(self._words())
        if found is not Fate.RUNNING:
            return WORDS[found]
        if self.reason is None and self.limit.warns(self._clock.monotonic()):
            return "the time limit is near"
        name = f" ({self.reason})" if self.signalled else ""
        return f"a signal was sent by hand{name}; Slurm did not preempt the job"
