"""What a job leaves for submitit: its log and, once the run has come to its end, the result.

Written by the keeper under the names that `submitit.SlurmJob(RUN_DIR/slurm, JOB)` looks for. Needs no submitit.
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
from ortflow.workflow.rundir import RunDir, write_atomically


def result_file(run: RunDir, job: str) -> Path:
    """Where submitit looks for a job's result."""
    return run.root / FOLDER / f"{job}_0_result.pkl"


def begin_job(run: RunDir, job: str) -> None:
    """Show where the log of a job is; a result of an earlier life is none any more. What cannot be written is left."""
    with suppress(OSError):
        result_file(run, job).unlink(missing_ok=True)
        link = run.root / FOLDER / f"{job}_0_log.out"
        link.parent.mkdir(exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(Path("..", "logs", f"slurm-{job}.log"))


def leave_result(run: RunDir, job: str) -> None:
    """Leave the result where the run has ended; nothing where it goes on, in this job or another.

    What cannot be written is left: the run's own record says the same.
    """
    how = read_status(run, alive=True)
    if not how.state.active:
        with suppress(OSError):
            write_atomically(result_file(run, job), pickle.dumps(outcome(how)))


def outcome(how: RunStatus) -> tuple[str, Any]:
    """submitit's pair of an ended run: "success" with the status as plain data, or "error" with why. Pure."""
    if how.state is State.FINISHED:
        return "success", how.to_json()
    words = "; ".join(word for word in (how.cause, how.why) if word)
    return "error", f"the run {how.name} in {how.directory} is {how.state.value}" + (f": {words}" if words else "")


def newest_job(records: Sequence[dict[str, Any]], job: str) -> str:
    """The job that the run of `job` is in now: that one, or the last of those that follow it. Pure."""
    for record in records:
        if record.get("event") == "submit" and record.get("follows") == job:
            job = str(record["job"])
    return job
