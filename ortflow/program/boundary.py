"""Between two steps: whether to save or to end now.

A step that accumulates gradients leaves them in the parameters, and a checkpoint has no gradients. So a save waits for
a step in which a registered optimizer was called. Before the first such step it waits while there are gradients, but
not for ever: the registered optimizer may be one that the program never calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONGEST_ACCUMULATION = 256
"""Steps that a save waits for the first call of an optimizer."""


class Boundary:
    """Decides from the checkpoint period, the agreed requests and the optimizers' steps.

    Parameters
    ----------
    period
        `steps` and `seconds` between two checkpoints; each may be missing.
    ask
        Called when the period in seconds has passed: asks for a round, so that all ranks save after the same step. None
        on ranks that do not measure the period.
    """

    def __init__(
        self, period: dict[str, Any], ask: Callable[[], None] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps: int | None = period.get("steps")
        seconds: float | None = period.get("seconds")
        self._ask, self._clock, self._seconds = ask, clock, seconds
        self._next = clock() + seconds if seconds is not None else None
        self._wanted = False
        self.stopping = False
        self._optimizers: list[Any] = []
        self._conditions: list[Callable[[], bool]] = []
        self._optimizers_step = self._stepped = False
        self._waited = 0

    def watch(self, optimizer: Any) -> None:
        """Notice the steps of a torch optimizer."""
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(self._notice)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Save only while the condition is true, such as that of an engine which accumulates gradients by itself."""
        self._conditions.append(condition)

    def _notice(self, *_: object) -> None:
        self._optimizers_step = self._stepped = True

    def due(self, position: int, checked: tuple[bool, bool]) -> bool:
        """Whether to save after `position` steps; `checked` is what the check has agreed: stop, save."""
        stop, save = checked
        self.stopping = self.stopping or stop
        self._wanted = (
            self._wanted or stop or save or (self._steps is not None and position > 0 and position % self._steps == 0)
        )
        if self._next is not None and self._ask is not None and self._clock() >= self._next:
            self._next = None
            self._ask()
        stepped, self._stepped = self._stepped, False
        if not self._wanted or not all(condition() for condition in self._conditions):
            return False
        return stepped or not self._accumulating()

    def _accumulating(self) -> bool:
        if self._optimizers_step:
            return True
        self._waited += 1
        return self._waited <= LONGEST_ACCUMULATION and any(
            parameter.grad is not None
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def saved(self) -> None:
        """Begin the next period."""
        self._wanted = False
        if self._seconds is not None:
            self._next = self._clock() + self._seconds
