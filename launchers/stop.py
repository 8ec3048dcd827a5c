"""Who wants the run to stop: signals to the launcher, a file in the run directory, the time limit.

Once means save and leave; a second Ctrl-C, or `ortflow cancel --now`, means leave now.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ortflow.launchers.records import CANCELS
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import Preempted
from ortflow.workflow.files import read_whole
from ortflow.workflow.room import is_full
from ortflow.workflow.rundir import write_atomically

FILE_PERIOD = 0.25
"""Seconds between two looks at the file, which may lie on a slow file system."""


class Stop:
    """Set by signals and by the file; read by the supervisor."""

    def __init__(self, file: Path, limit: float | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.reason: str | None = None
        """Why the run shall stop: interrupt, SIGTERM, SIGHUP, cancel, time limit."""
        self.now = False
        """Without saving."""
        self.signalled = False
        """The reason came by a signal, not from the file or the clock."""
        self._file, self._clock = file, clock
        self._end = None if limit is None else clock.monotonic() + limit
        self._next_look = 0.0

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good: one that comes when all is done must not change how the run ended."""
        return taken_over(self._handle, for_good=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.now = self.reason is not None
            self.reason = self.reason or "interrupt"
        elif self.reason is None:
            self.reason, self.signalled = signal.Signals(number).name, True

    def look(self, *, at_once: bool = False) -> str | None:
        """The reason, after a look at file and clock."""
        moment = self._clock.monotonic()
        if at_once or moment >= self._next_look:
            self._next_look = moment + FILE_PERIOD
            if (request := read_request(self._file)) is not None:
                # One without a word was written on a full disk, perhaps by us, of a signal that came before.
                if "reason" in request or self.reason is None:
                    self.take(str(request.get("reason", "cancel")))
                self.now = self.now or bool(request.get("now"))
        if self._end is not None and moment >= self._end:
            self.reason = self.reason or "time limit"
        return self.reason

    def settle(self) -> str | None:
        """The reason, looked for everywhere: what is decided next hangs on it."""
        return self.look(at_once=True)

    def other_than_preemption(self) -> str | None:
        """Why ranks that saved and left were made to, in words, where that counts as no preemption."""
        return None

    def take(self, reason: str) -> None:
        """A person's wish goes before a signal."""
        if self.reason is None or (self.signalled and reason in CANCELS):
            self.reason, self.signalled = reason, False


def interruptible() -> AbstractContextManager[None]:
    """Before ranks run: a signal to stop raises Preempted, so that what was begun is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Preempted(f"stopped by {signal.Signals(number).name} before a rank was started")

    return taken_over(leave)


@contextmanager
def taken_over(
    handler: Callable[[int, FrameType | None], Any],
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *,
    for_good: bool = False,
    ignored: bool = False,
) -> Iterator[None]:
    """Handle signals to stop while inside, or `for_good`; an ignored one (nohup) stays so unless `ignored` is set."""
    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
    for taken in numbers:
        if ignored or signal.getsignal(taken) is not signal.SIG_IGN:
            before[taken] = signal.signal(taken, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # Not where somebody inside has taken it over for good.
            if not for_good and signal.getsignal(number) == handler:
                signal.signal(number, earlier)


def write_request(file: Path, reason: str, *, now: bool = False) -> None:
    """Ask a run to stop; its ranks look at the file too. On a full disk an empty file says it."""
    try:
        write_atomically(file, json.dumps({"reason": reason, "now": now}).encode())
    except OSError as error:
        if not is_full(error) or now:
            raise
        file.touch()


def read_request(file: Path) -> dict[str, Any] | None:
    """What stands in the file; None if there is none. One that is being written asks too."""
    try:
        text = read_whole(file)
    except OSError:
        return None
    with suppress(ValueError):
        request = json.loads(text)
        if isinstance(request, dict):
            return request
    return {}
