"""Writes the stacks of all threads to the rank's log if the rank has not passed a check for a while.

Re-armed by `StopFlag` as the rank moves. A thread of `faulthandler`, which needs no lock of Python, writes them: it
works while the main thread is in a collective call, a kernel or an endless loop. The launcher reads them
(`launchers/attempts/stacks.py`).
"""

from __future__ import annotations

import faulthandler

from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

SHARE = 0.7
"""Of the time after which an attempt counts as hung: the stacks must be written before the launcher looks for them."""
PROGRAM_STACKS = "The program does not move; its stacks:"
"""Line before the stacks of a program."""
LOG = 2
"""The rank's log, by its descriptor: what libraries do with `sys.stderr` does not matter."""


class HangWatch:
    """Dumps the stacks once after `SHARE` of `seconds` without a call of `moved`."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limit, self._clock = SHARE * seconds, clock
        # Not at each call: to arm it starts a thread.
        self._period = min(5.0, self._limit / 4)
        self._next = 0.0

    def moved(self) -> None:
        """The rank is alive; called often."""
        if self._clock.monotonic() >= self._next:
            self._next = self._clock.monotonic() + self._period
            faulthandler.dump_traceback_later(self._limit, file=LOG)

    def end(self) -> None:
        """Write nothing any more."""
        faulthandler.cancel_dump_traceback_later()
