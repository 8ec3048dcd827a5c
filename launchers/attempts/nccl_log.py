"""Adds NCCL's warnings in the ranks' logs to the cause of a failure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.workflow.comm.nccl_messages import Trouble, in_log
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import open_regular

TAIL = 64 << 10
"""Bytes at the end of a log that are searched."""
MOST = 64
"""Number of logs that are searched: a network failure affects many ranks."""


def explained(cause: Cause, run: RunDir, attempt: int, world_size: int) -> Cause:
    """Return the cause, extended if it is a failure that a warning of NCCL in a rank's log explains."""
    if cause.outcome is not Outcome.FAILURE:
        return cause
    ranks = [cause.rank] if cause.rank is not None else []
    for rank in [*ranks, *range(min(world_size, MOST))]:
        trouble = _in_tail(run.log(attempt, rank))
        if trouble is not None:
            is_said = trouble.what in cause.sentence
            return cause if is_said else replace(cause, sentence=f"{cause.sentence}: NCCL reports that {trouble}")
    return cause


def _in_tail(path: Path) -> Trouble | None:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return in_log(file.read(TAIL).decode(errors="replace"))
    except OSError:
        return None
