"""A clock that advances only in `sleep`: a test of minutes takes milliseconds.

Actions are scheduled beforehand, `clock.after(20, action)`, and run inside the sleep that passes
that moment. Everything is in one thread, so nothing depends on how fast the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 30 * 86400.0
"""Seconds after which a loop that nothing ends is taken for one that never ends."""


class FakeClock:
    """An `ortflow.workflow.system.clock.Clock`."""

    def __init__(self, unix: float | None = None) -> None:
        self.now = 1000.0
        """What `monotonic` gives."""
        self.ahead = (time.time() if unix is None else unix) - self.now
        """Seconds that the time of day is ahead of it."""
        self.sleeps: list[float] = []
        """Seconds of each sleep."""
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.ahead

    def sleep(self, seconds: float, /) -> None:
        """Advance, and run the actions that are due."""
        assert seconds >= 0, "time.sleep refuses a negative number"
        assert self.now < LONGEST, "waits without end"
        self.sleeps.append(seconds)
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            moment, _, action = self._due.pop(0)
            self.now = max(self.now, moment)
            action()
        self.now = max(self.now, end)

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule an action in so many seconds."""
        self._due.append((self.now + seconds, len(self._due), action))
        self._due.sort(key=lambda one: one[:2])
