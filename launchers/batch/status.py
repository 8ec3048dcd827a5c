"""The status of a run in a batch scheduler, from its directory and from the queue. Pure except for reading the
directory.

The directory takes precedence; only the scheduler knows why the run waits, where it runs, and what happened to a job
that ended without a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortflow.launchers.attempts.locks import holder_of
from ortflow.launchers.batch.elapsed import seconds_since
from ortflow.launchers.batch.history import SETTLE, belongs, find, in_doubt, in_order, is_settled, newest_job
from ortflow.launchers.batch.scheduler import BatchJob, JobT, Scheduler
from ortflow.launchers.copies import original
from ortflow.launchers.placed import Placed, placed
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus, read_status
from ortflow.launchers.supervision.elastic import absent
from ortflow.workflow.run.rundir import RunDir


def gone(run: RunDir, jobs: Sequence[BatchJob], launcher: str) -> str | None:
    """The id of the run's newest job, if that is not among `jobs`."""
    history = placed(run.read_attempts(), launcher)
    return newest_job(history) if _is_missing(find(history, jobs), history) else None


def status(
    run: RunDir,
    scheduler: Scheduler[JobT],
    jobs: Sequence[JobT] | None,
    remember: Callable[[str], JobT | None] = lambda job_id: None,
    silence: str = "",
) -> RunStatus:
    """The run's status.

    A run that has ended may still have a job in the queue: a controller that died had not stored its start.

    Parameters
    ----------
    run
        The run.
    scheduler
        Its scheduler, which is not queried.
    jobs
        This user's jobs; None if the scheduler does not answer, which `silence` explains.
    remember
        Finds another job by its id; called only for one that has left without a record.
    silence
        Why the scheduler does not answer.
    """
    # Read after the queue: a run that ends in between is recorded here before its job leaves the queue.
    records = in_order(run.read_attempts())
    settled = is_settled(records)
    launcher = scheduler.launcher
    history = placed(records, launcher)
    last = newest_job(history)
    if not settled and (other := original(run, records, launcher)) is not None:
        return replace(_copy(run, records, other, last), launcher=launcher)
    job = find(history, jobs or ())
    if last is not None and jobs is not None and not settled and _is_missing(job, history):
        job = remember(last) or job
    alive = jobs is None or (job is not None and job.active)
    run_status = read_status(run, records=records, alive=alive)
    run_status = replace(run_status, launcher=launcher, job=job.id if job else last)
    if settled:
        if job is None or not job.waits:
            return run_status
        return replace(run_status, waits=scheduler.left_in_queue(job), job_restarts=job.restarts)
    if jobs is None:
        return replace(run_status, waits=silence)
    if job is not None and job.active:
        return _active(run_status, job, scheduler)
    return replace(run_status, **_lost(run, records, job, last, scheduler))


def _copy(run: RunDir, records: Sequence[dict[str, Any]], other: Path, last: str | None) -> RunStatus:
    """Status of a directory that was copied while its run was in progress: no process works in it."""
    run_status = read_status(run, records=records, alive=False)
    job = f"job {last} belongs to that" if last is not None else "its job belongs to that"
    cause = f"this is a copy of {other}, and {job}; `ortflow resume {run.root}` continues here"
    return replace(run_status, state=State.LOST, cause=cause, why=None)


def _is_missing(job: BatchJob | None, history: Sequence[Placed]) -> bool:
    """Whether the run's newest job may be another than the one that was found, which has ended."""
    return job is None or (not job.active and history[-1].job not in (None, job.id, job.array))


def _active(run_status: RunStatus, job: JobT, scheduler: Scheduler[JobT]) -> RunStatus:
    # The directory does not know a job yet whose submission got no answer.
    run_state = run_status.state if run_status.state.active else State.PENDING
    run_status = replace(run_status, state=run_state, job_restarts=job.restarts, nodes=job.nodes or None)
    reason = scheduler.waiting(job)
    if job.waits:
        # Even if the directory has a running attempt: none of its processes run now.
        run_state = State.PENDING if run_state is State.PENDING else State.RESTARTING
        starts = scheduler.expected_start(job)
        if run_status.excluded_nodes:
            reason = f"{reason or 'the job is in the queue'}; {absent([*run_status.excluded_nodes], 'excluded')}"
        return replace(run_status, state=run_state, phase=None, seconds_left=None, waits=reason, starts_at=starts)
    if job.ending:
        return replace(run_status, nodes=None, waits=reason)
    if reason is None and run_status.state is State.PENDING:
        reason = "the job has begun, its first attempt has not"
    return replace(run_status, job_ends_at=job.end, waits=reason or run_status.waits)


def _lost(
    run: RunDir, records: Sequence[dict[str, Any]], job: JobT | None, last: str | None, scheduler: Scheduler[JobT]
) -> dict[str, Any]:
    """State and cause of a run whose job is gone, and whose directory does not say how it ended."""
    doubt, command = in_doubt(records), scheduler.submit_command
    if doubt is not None and (job is None or not belongs(job, placed(records, scheduler.launcher)[-1])):
        seconds = seconds_since(doubt, scheduler.clock)
        if seconds is None:
            return {"state": State.PENDING, "waits": _elsewhere(doubt, command)}
        if seconds < SETTLE or holder_of(run.lock) is not None:
            return {"state": State.PENDING, "waits": f"{command} did not answer: the job may still enter the queue"}
        return {"state": State.LOST, "cause": "the job did not enter the queue: submit it again"}
    if job is not None and (cancellation := scheduler.cancelled(job)) is not None:
        return {"state": State.CANCELLED, "cause": cancellation}
    nodes = (job.nodes or None) if job else None
    return {"state": State.LOST, "cause": scheduler.ending(run, job, last), "nodes": nodes}


def _elsewhere(doubt: dict[str, Any], command: str) -> str:
    """Status of a submission by another machine, whose age only that machine's clock could show."""
    place = f" on {doubt['host']}" if doubt.get("host") else ""
    return (
        f"{command}{place} did not answer, and the job is not in the queue: it may still enter it; submitting again "
        "waits for that and starts no second one"
    )
