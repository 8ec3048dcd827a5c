"""The end of an attempt whose run directory was renamed or removed while it was active. Used by the supervisor.

Ranks notice it themselves, save where the directory went and exit. Nothing may be created at the old path.
"""

from __future__ import annotations

import os
from pathlib import Path

from ortflow.launchers.attempts.cause import agreed
from ortflow.launchers.attempts.tail import ends_of, last_records
from ortflow.launchers.records import Outcome
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED, OrtflowError
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir


class DirectoryMoved(OrtflowError):
    """The run directory is no longer at its path; `exit_code` says whether the ranks have saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def location_of(run: RunDir) -> Location | None:
    """The run directory, opened; None if it cannot be, as in a file system without the right to read it."""
    try:
        return Location(run.root)
    except OSError:
        return None


def recorded_end(location: Location, number: int, world_size: int) -> DirectoryMoved:
    """Record the end of an attempt at the directory's new path, if it has one; returns the error to raise."""
    root, current = location.root, location.current()
    if current is None:
        message = f"{root} was removed, or renamed by another machine, while the run was active"
        return DirectoryMoved(f"{message}; the run is stopped, and may not be saved", EXIT_FAILURE)
    run = RunDir(current)
    ended = agreed(ends_of(run, number, range(world_size)), world_size)
    outcome = ended.outcome if ended is not None else Outcome.FAILURE
    code = ended.exit_code if ended is not None else EXIT_FAILURE
    cause = f"the run directory was renamed to {current} while the run was active"
    steps = [record["step"] for record in last_records(run.events(0)) if record.get("event") == "step"]
    run.record_attempt(
        event="end", attempt=number, outcome=outcome.value, step=max(steps, default=0), exit_code=code, cause=cause,
        rank=None, next="stop", pause=0.0, why=f"continue it with `ortflow resume {current}`", asked=None,
    )  # fmt: skip
    saved = "the ranks have saved" if code == EXIT_PREEMPTED else "the ranks have not saved"
    return DirectoryMoved(f"{root}: {cause}; {saved}; `ortflow resume {current}` continues", code or EXIT_PREEMPTED)


def between_attempts(location: Location) -> DirectoryMoved:
    """Record at the directory's new path, if it has one, that no attempt follows; returns the error to raise."""
    root, current = location.root, location.current()
    if current is None:
        return DirectoryMoved(f"{root} was removed, or renamed by another machine: the run is stopped", EXIT_FAILURE)
    cause = f"the run directory was renamed to {current} between two attempts"
    RunDir(current).record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, why=cause)
    return DirectoryMoved(f"{root}: {cause}; `ortflow resume {current}` continues", EXIT_PREEMPTED)


def is_same(root: Path, lock: int, name: str) -> bool:
    """Whether the open file `lock` is the file `name` in the directory `root`."""
    try:
        return os.path.samestat(os.stat(root / name), os.fstat(lock))
    except OSError:
        return False
