"""The clock of everything that waits or measures time, so that a test can replace it.

A component with a loop takes a `Clock` as its last argument. Tests advance the clock rather than shorten periods.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The functions of module `time` that components use."""

    def monotonic(self) -> float:
        """Seconds of a monotonic clock; the zero point is arbitrary."""

    def time(self) -> float:
        """Unix time in seconds; another machine's clock may differ by hours."""

    def sleep(self, seconds: float, /) -> None:
        """Return after `seconds`."""


SYSTEM_CLOCK: Clock = time
