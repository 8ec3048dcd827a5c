"""The agreement on the check at which every rank stops, or saves. Pure: messages in, messages out.

Each program counts its checks (readings of `should_stop`). In a round, every connected program names the next check
that it has not begun (`bound`), and waits there. The largest bound is the check at which all act (`verdict`): no
program has passed it, and each reaches it. The round needs no collective call of the programs, so it works while one
hangs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ortflow.workflow.program.wire import SAVE, STOP


@dataclass
class Round:
    """A round in progress."""

    number: int
    purpose: str
    reason: str
    waiting: set[int]
    """Members that have not answered."""
    bounds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Prepare:
    """Ask every member for its bound."""

    round: int
    purpose: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The check of all members."""

    round: int
    purpose: str
    check: int


class Agreement:
    """The rounds of an attempt, one at a time."""

    def __init__(self) -> None:
        self.current: Round | None = None
        self.stop_check: int | None = None
        """The agreed check of the stop, once there is one."""
        self._number = 0
        self._requests: dict[str, str] = {}

    def ask(self, purpose: str, reason: str, members: Collection[int]) -> list[Prepare | Verdict]:
        """Begin a round with these members, or after the current one. A stop is agreed once."""
        if purpose == STOP and (self.stop_check is not None or self._runs(STOP)):
            return []
        if purpose == SAVE and self._runs(SAVE):
            return []
        self._requests.setdefault(purpose, reason)
        return self._next(members)

    def bound(self, member: int, number: int, check: int, members: Collection[int]) -> list[Prepare | Verdict]:
        """A member's answer."""
        if self.current is None or self.current.number != number or member not in self.current.waiting:
            return []
        self.current.waiting.discard(member)
        self.current.bounds.append(check)
        return self._settle(members)

    def left(self, member: int, members: Collection[int]) -> list[Prepare | Verdict]:
        """A member has no connection any more: nobody waits for it."""
        if self.current is None or member not in self.current.waiting:
            return []
        self.current.waiting.discard(member)
        return self._settle(members)

    def _runs(self, purpose: str) -> bool:
        return purpose in self._requests or (self.current is not None and self.current.purpose == purpose)

    def _settle(self, members: Collection[int]) -> list[Prepare | Verdict]:
        current = self.current
        if current is None or current.waiting:
            return []
        self.current = None
        messages: list[Prepare | Verdict] = []
        if current.bounds:
            check = max(current.bounds)
            if current.purpose == STOP:
                self.stop_check = check
            messages.append(Verdict(current.number, current.purpose, check))
        return messages + self._next(members)

    def _next(self, members: Collection[int]) -> list[Prepare | Verdict]:
        if self.current is not None or not members:
            return []
        for purpose in (STOP, SAVE):
            if purpose in self._requests:
                reason = self._requests.pop(purpose)
                self._number += 1
                self.current = Round(self._number, purpose, reason, {*members})
                return [Prepare(self._number, purpose, reason)]
        return []

    def joined(self, members: Collection[int]) -> list[Prepare | Verdict]:
        """A program connects: it takes part in a stop that was asked for before any had connected."""
        return self._next(members)
