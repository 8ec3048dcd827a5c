"""The request to save and stop: a flag that is checked wherever a rank can wait.

Set by SIGTERM, SIGUSR1, SIGUSR2 or SIGINT, or by a file in the run directory where no signal can be sent. The handler
only sets the flag; the executor saves, agrees with other ranks and exits. Installed before anything heavy is imported,
because a preemption does not wait for imports.

Every rank passes these checks again and again, so a check also updates the heartbeat (`beat`), by which a launcher
detects a run that hangs.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType

from ortflow.workflow.run.hang import HangWatch
from ortflow.workflow.run.location import Location
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
FILE_PERIOD = 0.25
"""Seconds between two checks of the file: a system call, which is slow on a network file system."""
BEAT_PERIOD = 5.0
"""Seconds between two heartbeats."""


class StopFlag:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self, file: Path | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._reason: str | None = None
        self._file, self._clock = file, clock
        self._next_check = 0.0
        self._heartbeat: Path | None = None
        self._next_beat = 0.0
        self._location: Location | None = None
        self._away = False
        self._hang: HangWatch | None = None

    def install(self) -> None:
        """Install the handlers of the stop signals; only in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Set the flag; the first reason is kept."""
        self._reason = self._reason or reason

    def beat(self, file: Path | None) -> None:
        """From now on, touch the file at each check, at most every BEAT_PERIOD; None: no more."""
        self._heartbeat = file

    def watch_for_hangs(self, watch: HangWatch | None) -> None:
        """From now on, tell the watch at each check that the rank moves; None: no more.

        The first check comes after the run is configured, which may hang, too.
        """
        self._hang = watch
        if watch is not None:
            watch.moved()

    def stay_in(self, location: Location) -> None:
        """From now on, ask to save and stop if the run directory was renamed or removed."""
        self._location = location

    @property
    def reason(self) -> str | None:
        """Why this rank should stop; None if it should not."""
        if self._hang is not None:
            self._hang.moved()
        if self._heartbeat is not None and self._clock.monotonic() >= self._next_beat:
            self._next_beat = self._clock.monotonic() + BEAT_PERIOD
            with contextlib.suppress(OSError):
                self._heartbeat.touch()
        if self._reason is None and self._file is not None:
            now = self._clock.monotonic()
            if now >= self._next_check:
                self._next_check = now + FILE_PERIOD
                if self._file.exists():
                    self.request("stop file")
                away = self._location is not None and not self._location.intact()
                if away and self._away:  # twice, because a network file system may miss it once
                    self.request(f"the run directory's removal or new name: it was {self._file.parent}")
                self._away = away
        return self._reason

    def __bool__(self) -> bool:
        return self.reason is not None
