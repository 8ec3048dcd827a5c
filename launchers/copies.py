"""Whether a run directory is a copy of one that is still there: its records name jobs that are not its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortflow.launchers.placed import placed
from ortflow.launchers.status import written_place
from ortflow.workflow.run.rundir import RunDir


def original(run: RunDir, records: Sequence[dict[str, Any]], launcher: str) -> Path | None:
    """Return the directory that this one was copied from and whose job its newest record names, or None.

    A directory that was moved keeps its jobs, because the old place is empty. A resumed copy is a separate run.
    """
    history = placed(records, launcher)
    recorded_place = written_place(run) if history else None
    if recorded_place is None or Path(recorded_place) == run.root:
        return None
    other = RunDir(Path(recorded_place))
    try:
        if not other.run_file.is_file() or os.path.samefile(other.root, run.root):
            return None
        other_records = other.read_attempts()
    except OSError:
        return None
    return (
        other.root
        if history[-1].submission in {submission.submission for submission in placed(other_records, launcher)}
        else None
    )
