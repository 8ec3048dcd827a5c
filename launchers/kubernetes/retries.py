"""When an action that the API server refuses is tried again. Used by `supervise`."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable

from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

LONGEST = 300.0
"""Seconds between two tries."""


class Retries:
    """The refused actions, each of which is tried again after a time that doubles.

    Parameters
    ----------
    first
        Seconds until the second try.
    clock
        The clock of the waits.
    """

    def __init__(self, first: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._first, self._clock = first, clock
        self._refused: dict[Hashable, tuple[int, float]] = {}
        """Refusals of each action in a row, and when it is due again."""

    def is_due(self, action: Hashable) -> bool:
        """Whether to try it now."""
        return self._clock.monotonic() >= self._refused.get(action, (0, 0.0))[1]

    def count(self, action: Hashable) -> int:
        """How often it has been refused in a row."""
        return self._refused.get(action, (0, 0.0))[0]

    def refused(self, action: Hashable) -> int:
        """Note a refusal; returns how many there are in a row."""
        count = self.count(action) + 1
        seconds = min(LONGEST, self._first * 2.0 ** min(count - 1, 30))
        self._refused[action] = (count, self._clock.monotonic() + seconds)
        return count

    def seconds_left(self) -> float:
        """Seconds until the first one is due; infinite without one."""
        return max(0.0, min((due for _, due in self._refused.values()), default=math.inf) - self._clock.monotonic())

    def forget_others(self, actions: Collection[Hashable]) -> None:
        """Forget the actions that are not among these: nothing requires them any more."""
        self._refused = {action: state for action, state in self._refused.items() if action in actions}

    def succeeded(self, action: Hashable) -> None:
        """Forget its refusals."""
        self._refused.pop(action, None)
