"""Requests to stop a run: signals to the launcher, a file in the run directory, the time limit.

The first request means save and stop; a second Ctrl-C, or `ortflow cancel --now`, means stop now.
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
from ortflow.workflow.errors import Preempted
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.disk_space import is_full
from ortflow.workflow.system.files import read_whole

GROWTH = "growth"
"""The reason in the stop file while an elastic run saves to restart with more nodes: ranks leave, the run goes on."""
FILE_PERIOD = 0.25
"""Seconds between two checks of the file, which may be on a slow file system."""


class Stop:
    """The request to stop, read by the supervisor.

    Parameters
    ----------
    file
        The stop file of the run directory.
    limit
        Seconds from now until the time limit; None for no limit.
    clock
        The clock of the time limit.
    """

    def __init__(self, file: Path, limit: float | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.reason: str | None = None
        """Why the run is to stop: interrupt, SIGTERM, SIGHUP, cancel, time limit."""
        self.now = False
        """Without saving."""
        self.signalled = False
        """The reason is a signal, not the file or the time limit."""
        self._file, self._clock = file, clock
        self._end = None if limit is None else clock.monotonic() + limit
        self._next_check = 0.0

    def listening(self) -> AbstractContextManager[None]:
        """Take over the signals, for good: a late one must not change how the run ended."""
        return taken_over(self._handle, for_good=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.now = self.reason is not None
            self.reason = self.reason or "interrupt"
        elif self.reason is None:
            self.reason, self.signalled = signal.Signals(number).name, True

    def check(self, *, fresh: bool = False) -> str | None:
        """Check file and time limit; returns the reason to stop, None if there is none."""
        moment = self._clock.monotonic()
        if fresh or moment >= self._next_check:
            self._next_check = moment + FILE_PERIOD
            request = read_request(self._file)
            if request is not None and request.get("reason") != GROWTH:
                # An empty file was written on a full disk, perhaps for the signal that is already known.
                if "reason" in request or self.reason is None:
                    self.take(str(request.get("reason", "cancel")))
                self.now = self.now or bool(request.get("now"))
        if self._end is not None and moment >= self._end:
            self.reason = self.reason or "time limit"
        return self.reason

    def settle(self) -> str | None:
        """The reason to stop, checked without delay: the next decision depends on it."""
        return self.check(fresh=True)

    def other_than_preemption(self) -> str | None:
        """Why ranks saved and stopped, if it does not count as a preemption; else None."""
        return None

    def take(self, reason: str) -> None:
        """Set the reason; a request of the user replaces a signal."""
        if self.reason is None or (self.signalled and reason in CANCELS):
            self.reason, self.signalled = reason, False


def interruptible() -> AbstractContextManager[None]:
    """While no ranks run, a stop signal raises Preempted, so that everything is cleaned up."""

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
    for stop_signal in numbers:
        if ignored or signal.getsignal(stop_signal) is not signal.SIG_IGN:
            before[stop_signal] = signal.signal(stop_signal, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # Keep a handler that was installed inside. By ==: each access to a bound method makes another object.
            if not for_good and signal.getsignal(number) == handler:
                signal.signal(number, earlier)


def write_request(file: Path, reason: str, *, now: bool = False) -> None:
    """Ask a run to stop. Its ranks check the file too. On a full disk the file is empty."""
    try:
        write_atomically(file, json.dumps({"reason": reason, "now": now}).encode())
    except OSError as error:
        if not is_full(error) or now:
            raise
        file.touch()


def read_request(file: Path) -> dict[str, Any] | None:
    """The content of the stop file; None if there is none, empty if it cannot be read."""
    try:
        text = read_whole(file)
    except OSError:
        return None
    with suppress(ValueError, RecursionError):
        request = json.loads(text)
        if isinstance(request, dict):
            return request
    return {}
