"""The clock of everything that waits or measures, so that a test can put its own in its place.

A component that loops takes a `Clock` as its last argument. Periods stay what they are: a test moves the clock on in
place of making them short.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a component needs of module `time`."""

    def monotonic(self) -> float:
        """Seconds of a clock that only runs forward; its zero means nothing."""

    def time(self) -> float:
        """Unix time in seconds; another machine's may differ by hours."""

    def sleep(self, seconds: float, /) -> None:
        """Return after so many seconds."""


SYSTEM_CLOCK: Clock = time
