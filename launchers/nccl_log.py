"""Adds NCCL's warnings in the ranks' logs to the cause of a failure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ortflow.launchers.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.workflow.comm.nccl_messages import Trouble, in_log
from ortflow.workflow.files import open_regular
from ortflow.workflow.rundir import RunDir

TAIL = 64 << 10
"""Bytes at the end of a log that are searched."""
MOST = 64
"""Number of logs that are searched: a network failure affects many ranks."""


def explained(found: Cause, run: RunDir, attempt: int, world_size: int) -> Cause:
    """Return the cause, extended if it is a failure that a warning of NCCL in a rank's log explains."""
    if found.outcome is not Outcome.FAILURE:
        return found
    ranks = [found.rank] if found.rank is not None else []
    for rank in [*ranks, *range(min(world_size, MOST))]:
        known = _in_tail(run.log(attempt, rank))
        if known is not None:
            reported = known.what in found.sentence
            return found if reported else replace(found, sentence=f"{found.sentence}: NCCL reports that {known}")
    return found


def _in_tail(path: Path) -> Trouble | None:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return in_log(file.read(TAIL).decode(errors="replace"))
    except OSError:
        return None
