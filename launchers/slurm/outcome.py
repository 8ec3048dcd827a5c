"""What a job leaves for submitit: its log and, when the run has ended, the result.

Written by the supervisor process under the names that `submitit.SlurmJob(RUN_DIR/slurm, JOB)` looks for. Does not need
submitit.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.records import State
from ortflow.launchers.slurm.sbatch import FOLDER
from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.run.rundir import RunDir, write_atomically


def result_file(run: RunDir, job: str) -> Path:
    """The path where submitit looks for a job's result."""
    return run.root / FOLDER / f"{job}_0_result.pkl"


def begin_job(run: RunDir, job: str) -> None:
    """Link the log of a job and remove the result of an earlier start. A file that cannot be written is skipped."""
    with suppress(OSError):
        result_file(run, job).unlink(missing_ok=True)
        link = run.root / FOLDER / f"{job}_0_log.out"
        link.parent.mkdir(exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(Path("..", "logs", f"slurm-{job}.log"))


def leave_result(run: RunDir, job: str) -> None:
    """Write the result if the run has ended; nothing if it continues, in this job or another.

    A file that cannot be written is skipped: the run's own records have the same content.
    """
    status = read_status(run, alive=True)
    if not status.state.active:
        with suppress(OSError):
            write_atomically(result_file(run, job), pickle.dumps(outcome(status)))


def outcome(status: RunStatus) -> tuple[str, Any]:
    """submitit's pair of an ended run: "success" with the status as plain data, or "error" with why. Pure."""
    if status.state is State.FINISHED:
        return "success", status.to_json()
    reasons = "; ".join(word for word in (status.cause, status.why) if word)
    return "error", f"the run {status.name} in {status.directory} is {status.state.value}" + (
        f": {reasons}" if reasons else ""
    )


def follower(records: Sequence[dict[str, Any]], job: str) -> str:
    """The current job of the run of `job`: that one, or the last of its successors. Pure."""
    for record in records:
        if record.get("event") == "submit" and record.get("follows") == job:
            job = str(record["job"])
    return job
