"""A batch script that a user has submitted by hand: checks that its run is free, and takes the run directory.

Used by the run supervisor before anything else. Any number of jobs may carry the same run: the first that starts takes
it, and every other exits while the scheduler knows a job that has it, running or pending.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.base import Submission
from ortflow.launchers.batch.current_job import CurrentJob
from ortflow.launchers.batch.history import by_hand, find_all, in_order, is_settled
from ortflow.launchers.batch.job_submission import active
from ortflow.launchers.batch.job_validity import is_on_record
from ortflow.launchers.batch.scheduler import BatchJob, JobT, NoAnswer, Scheduler
from ortflow.launchers.prepare import prepare
from ortflow.launchers.records import State, state
from ortflow.launchers.remote.arrival import submit_record
from ortflow.launchers.run_directory_lock import opened
from ortflow.manifests.array import run_file
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.system.files import open_regular

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

PATIENCE = 60.0
"""Seconds for which the query for another job of the run is retried if the scheduler does not answer."""
PAUSE = 3.0


def claim(run: RunDir, job: CurrentJob, scheduler: Scheduler[Any], text: str, folder: Path | None, python: str) -> bool:
    """Take the run directory for this job; False if the run has finished.

    `text` is the run file that the script carries; `folder` is where its `prepare` runs, with `python` as the ranks'
    interpreter. Raises UserError if another job has the run, or the directory holds something else.
    """
    leave_to_another(run, job, scheduler)
    run_file_text = text if job.task is None else run_file(text, job.task)
    # Again under the lock: two may have started at the same moment.
    with opened(Submission(_spec(run_file_text, run), run), lambda: leave_to_another(run, job, scheduler)) as directory:
        if directory.finished:
            return False
        prepare(directory.spec, folder, python)
        run.stop_request.unlink(missing_ok=True)
        failed = state(in_order(run.read_attempts()), alive=False) is State.FAILED
        run.record_attempt(event="submit", launcher=job.launcher, job=job.id, new_budget=failed, **submit_record())
        directory.handed_over = True
    return True


def redirect(run: RunDir, job: CurrentJob) -> None:
    """Redirect the job's output to the usual log of a batch job. Raises OSError."""
    log = run.root / "logs" / f"{job.launcher}-{job.id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"the output of this job is in {log}", flush=True)
    descriptor = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def leave_to_another(run: RunDir, job: CurrentJob, scheduler: Scheduler[Any]) -> None:
    """Raise UserError if another job has the run or starts it before us, or if that is unknown."""
    end = scheduler.clock.monotonic() + PATIENCE
    while True:
        try:
            other, own_jobs = active(run, scheduler), scheduler.mine()
            break
        except NoAnswer as error:
            if not run.root.is_dir():
                return
            if scheduler.clock.monotonic() >= end:
                raise UserError(
                    f"{run.root} may be another job's, and {error.who} does not answer ({error.message})",
                    fix="submit the script again when it does",
                ) from error
            scheduler.clock.sleep(PAUSE)
    records = run.read_attempts()
    if other is None or not is_others(other, job, records):
        other = rival(run, job, own_jobs, records)
    if other is not None:
        raise UserError(
            f"job {other.id} has the run in {run.root} and is {other.state.lower()}: this job exits",
            fix=f"follow it with `ortflow logs -f {run.root}`, stop it with `ortflow cancel {run.root}`",
        )


def rival(run: RunDir, job: CurrentJob, jobs: Sequence[JobT], records: Sequence[dict[str, Any]]) -> JobT | None:
    """A running job of the same script that has not recorded itself yet and was submitted before this one. Pure.

    The directory's lock separates two that start together, but not on a file system with locks per node.
    """
    task = job.id.partition("_")[2]
    running = [
        candidate
        for candidate in find_all(by_hand(run.root), jobs)
        if not candidate.waits and candidate.id.partition("_")[2] == task
    ]
    own_number = next((candidate.number for candidate in running if candidate.id == job.id), None)
    if own_number is None:
        return None
    return next(
        (
            candidate
            for candidate in running
            if candidate.number < own_number and not is_on_record(records, candidate.id)
        ),
        None,
    )


def is_others(other: BatchJob, job: CurrentJob, records: Sequence[dict[str, Any]]) -> bool:
    """Whether the run is active in another job; a completing job has released it. Pure."""
    return other.id != job.id and (other.waits or not is_settled(records))


def _spec(text: str, run: RunDir) -> RunSpec:
    spec = load_run_text(text, "the run file in the batch script")
    if spec.run_dir is None or Path(spec.run_dir) != run.root:
        raise UserError(
            f"is {spec.run_dir} in the run file of the batch script, whose commands name {run.root}",
            where="run_dir",
            fix="give both the same, or render the script again",
        )
    return resolve_paths(spec, run.run_file)
