"""Waits for space on a full disk instead of ending a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision.supervised import Job, View
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.system.clock import Clock
from ortflow.workflow.system.disk_space import Notice, OutOfDisk, is_full, out_of_disk, wait_for_room

T = TypeVar("T")


class DiskWait:
    """Waits for space in a run directory, at most `job.room_seconds` or until a stop is requested."""

    def __init__(self, job: Job, view: View, stop: Stop, clock: Clock) -> None:
        self._job, self._view, self._stop, self._clock = job, view, stop, clock
        self.notice = Notice(job.run.heartbeat)

    def retry(self, do: Callable[[], T]) -> T:
        """Call `do`, again if the disk was full and has space now. Raises OutOfDisk."""
        while True:
            try:
                return do()
            except (OSError, OrtflowError) as error:
                if not is_full(error):
                    raise
                lack = out_of_disk(error, default=self._job.run.root)
                if not self.wait(lack) or self._stop.check():
                    raise lack from error

    def wait(self, lack: OutOfDisk) -> bool:
        """Wait for space on the disk; False after `room_seconds`."""

        def asked() -> object:
            self._view.tick()
            return self._stop.check()

        self._view.message(f"{lack}: waiting {self._job.room_seconds:g} s for room")
        room = wait_for_room(lack, self.notice, self._job.room_seconds, asked, self._clock)
        return room or bool(self._stop.check())
