"""The records of a supervised run: appended to attempts.jsonl, also on a full disk, and only in the run's own folder.

Used by the supervisor.
"""

from __future__ import annotations

from typing import Any

from ortflow.launchers.attempts.tail import last_records
from ortflow.launchers.supervision.disk_wait import DiskWait
from ortflow.launchers.supervision.moved_directory import between_attempts
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir


class AttemptRecords:
    """Reads and appends the records.

    Parameters
    ----------
    run
        The run directory.
    location
        Where it was at the start; None if that cannot be followed.
    disk
        Waits for space.
    """

    def __init__(self, run: RunDir, location: Location | None, disk: DiskWait) -> None:
        self._run, self._location, self._disk = run, location, disk

    def stay(self) -> None:
        """Raise DirectoryMoved if the run directory is no longer at its path."""
        if self._location is not None and not self._location.intact():
            raise between_attempts(self._location)

    def append(self, **fields: Any) -> None:
        """Append a record, waiting for space on a full disk; raises OutOfDisk after `room_seconds`.

        Raises DirectoryMoved instead of creating the directory again.
        """
        self.stay()
        self._disk.retry(lambda: self._run.record_attempt(**fields))

    def read(self) -> list[dict[str, Any]]:
        """Every record, oldest first."""
        return self._run.read_attempts()

    def last_step(self) -> int:
        """The last step that rank 0 has recorded; 0 if there is none."""
        events = reversed(last_records(self._run.events(0)))
        return int(next((record["step"] for record in events if record.get("event") == "step"), 0))
