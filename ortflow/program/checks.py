"""The agreement on the check from which every rank stops or saves: this rank's half, without its connection.

The loop calls `begin` at each check. The connection's thread calls the others. A round of the coordinator asks each
rank for the next check that it has not begun, and holds it there until the largest of these is known, so that no rank
passes the agreed check before it learns of it. The thread answers while the loop is inside a collective.
"""

from __future__ import annotations

import threading

from ortflow.workflow.program.wire import SAVE, STOP


class Checks:
    """Counts the checks of one rank. `begin` costs two assignments and a test unless a round is open."""

    def __init__(self) -> None:
        self.count = 0
        """Checks begun."""
        self.reason: str | None = None
        """Why the run stops, once that is asked for."""
        self._special = False
        self._changed = threading.Condition()
        self._bound: int | None = None
        self._agreed: dict[str, int] = {}

    def begin(self) -> tuple[bool, bool]:
        """Begin the next check: whether to stop from here on, and whether to save here.

        Blocks while a round has no verdict and this check is not before the bound.
        """
        index = self.count
        # In this order: `prepare` sets `_special` before it reads `count`, so that one of the two sees the other.
        self.count = index + 1
        return self._look(index) if self._special else (False, False)

    def _look(self, index: int) -> tuple[bool, bool]:
        with self._changed:
            while self._bound is not None and index >= self._bound:
                self._changed.wait()
            stop = index >= self._agreed.get(STOP, index + 1)
            save = index >= self._agreed.get(SAVE, index + 1)
            if save:
                del self._agreed[SAVE]
            self._special = self._bound is not None or bool(self._agreed)
        return stop, save

    def prepare(self, purpose: str, reason: str) -> int:
        """Open a round; returns the bound: the next check that this rank has not begun."""
        with self._changed:
            self._special = True
            if purpose == STOP:
                self.reason = self.reason or reason
            self._bound = self.count
            return self._bound

    def settle(self, purpose: str, check: int) -> None:
        """Close the round: the purpose applies from `check` on."""
        with self._changed:
            self._bound = None
            self._agreed[purpose] = check
            self._changed.notify_all()

    def stop_now(self, reason: str) -> None:
        """Stop at the next check, without an agreement: there is nobody to agree with."""
        with self._changed:
            self.reason = self.reason or reason
            self._special = True
            self._bound = None
            self._agreed[STOP] = 0
            self._changed.notify_all()
