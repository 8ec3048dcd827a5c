"""The status of a run in Slurm, from its directory and from Slurm. Pure except for reading the directory.

The directory takes precedence; only Slurm knows why the run waits, where it runs, and what happened to a job that
ended without a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortflow.launchers.batch.copies import original
from ortflow.launchers.batch.history import SETTLE, Placed, belongs, find, in_doubt, in_order, is_settled, placed
from ortflow.launchers.batch.moments import passed
from ortflow.launchers.cause import signal_name
from ortflow.launchers.locks import holder_of
from ortflow.launchers.records import State
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.reasons import left_in_queue, never_starts, waits
from ortflow.launchers.status import RunStatus, read_status
from ortflow.launchers.tail import last_lines
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.rundir import RunDir

NEVER_BEGAN = 53
"""The signal that Slurm reports if it could not open the job's output."""
_ENDS = {
    "TIMEOUT": "Slurm ended the job at its time limit before the ranks had saved; raise backends.slurm.signal_seconds "
    "or resources.time_limit",
    "NODE_FAIL": "a node of the job was lost, and Slurm may not queue it again (backends.slurm.requeue, or the site)",
    "PREEMPTED": "Slurm preempted the job, and may not queue it again (backends.slurm.requeue, or the site)",
    "OUT_OF_MEMORY": "the job was out of memory; raise resources.memory",
    "BOOT_FAIL": "its nodes did not start",
    "DEADLINE": "the job could not end before its deadline",
    "COMPLETED": "the job ended and left no record in the run directory, which must be the same folder on every node",
}  # fmt: skip


def gone(run: RunDir, jobs: Sequence[Job]) -> str | None:
    """The id of the run's newest job, if that is not among `jobs`."""
    history = placed(run.read_attempts(), "slurm")
    return None if find(history, jobs) is not None else _newest(history)


def status(
    run: RunDir,
    jobs: Sequence[Job] | None,
    remember: Callable[[str], Job | None],
    silence: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> RunStatus:
    """The run's status, `jobs` are this user's; None if Slurm does not answer, which `silence` explains.

    `remember` finds another job by its id; called only for one that has left without a record.
    A run that has ended may still have a job in the queue: a controller that died had not stored its start.
    """
    # Read after the queue: a run that ends in between is recorded here before its job leaves the queue.
    records = in_order(run.read_attempts())
    settled = is_settled(records)
    history = placed(records, "slurm")
    if not settled and (other := original(run, records, "slurm")) is not None:
        return _copy(run, records, other, _newest(history))
    job = find(history, jobs or ())
    last = _newest(history)
    if job is None and last is not None and jobs is not None and not settled:
        job = remember(last)
    alive = jobs is None or (job is not None and job.active)
    reported = read_status(run, records=records, alive=alive)
    reported = replace(reported, launcher="slurm", job=job.id if job else last)
    if settled:
        if job is None or not job.waits:
            return reported
        return replace(reported, waits=left_in_queue(job), job_restarts=job.restarts)
    if jobs is None:
        return replace(reported, waits=silence)
    if job is not None and job.active:
        return _active(reported, job)
    return replace(reported, **_lost(run, records, job, last, clock))


def _copy(run: RunDir, records: Sequence[dict[str, Any]], other: Path, last: str | None) -> RunStatus:
    """Of a directory that was copied while its run was under way: nobody is at work in it."""
    reported = read_status(run, records=records, alive=False)
    job = f"job {last} belongs to that" if last is not None else "its job belongs to that"
    cause = f"this is a copy of {other}, and {job}; `ortflow resume {run.root}` goes on here"
    return replace(reported, launcher="slurm", state=State.LOST, cause=cause, why=None)


def _newest(history: Sequence[Placed]) -> str | None:
    return next((one.job for one in reversed(history) if one.job is not None), None)


def _active(reported: RunStatus, job: Job) -> RunStatus:
    # The directory does not know a job yet whose submission got no answer.
    found = reported.state if reported.state.active else State.PENDING
    reported = replace(reported, state=found, job_restarts=job.restarts, nodes=job.nodes or None)
    if job.waits:
        # Even if the directory has a running attempt: none of its processes run now.
        found = State.PENDING if found is State.PENDING else State.RESTARTING
        # Slurm keeps the start time that it expected before the job was held, or the last one.
        starts = None if never_starts(job) else job.start
        return replace(reported, state=found, phase=None, seconds_left=None, waits=waits(job), starts_at=starts)
    if job.state == "COMPLETING":
        return replace(reported, nodes=None, waits="Slurm ends the job, to restart it or finally")
    reported = replace(reported, job_ends_at=job.end)
    if job.state in ("SUSPENDED", "STOPPED"):
        return replace(reported, waits="Slurm has suspended it")
    if job.state == "CONFIGURING":
        return replace(reported, waits="its nodes are being prepared")
    if reported.state is State.PENDING:
        return replace(reported, waits="the job has begun, its first attempt has not")
    return reported


def _lost(
    run: RunDir, records: Sequence[dict[str, Any]], job: Job | None, last: str | None, clock: Clock
) -> dict[str, Any]:
    """State and cause of a run whose job is gone, and whose directory does not say how it ended."""
    doubt = in_doubt(records)
    if doubt is not None and (job is None or not belongs(job, placed(records, "slurm")[-1])):
        seconds = passed(doubt, clock)
        if seconds is None:
            return {"state": State.PENDING, "waits": _elsewhere(doubt)}
        if seconds < SETTLE or holder_of(run.lock) is not None:
            return {"state": State.PENDING, "waits": "sbatch did not answer: the job may still enter the queue"}
        return {"state": State.LOST, "cause": "the job did not enter the queue: submit it again"}
    if job is not None and job.state == "CANCELLED":
        return {"state": State.CANCELLED, "cause": _cancelled(job)}
    return {"state": State.LOST, "cause": _ending(run, job, last), "nodes": (job.nodes or None) if job else None}


def _elsewhere(doubt: dict[str, Any]) -> str:
    """Of a submission by another machine: how long ago that was, only its own clock could tell."""
    where = f" on {doubt['host']}" if doubt.get("host") else ""
    return (
        f"sbatch{where} did not answer, and the job is not in the queue: it may still enter it; submitting again waits "
        "for that and starts no second one"
    )


def _cancelled(job: Job) -> str:
    if job.reason == "DependencyNeverSatisfied":
        return "Slurm removed the job: its dependency did not end as required"
    return f"job {job.id} was cancelled in Slurm" + (f" {job.reason}" if job.reason.startswith("by ") else "")


def _ending(run: RunDir, job: Job | None, last: str | None) -> str:
    if job is None:
        return f"Slurm no longer knows of job {last}, and it left no record"
    where = f" on {job.nodes}" if job.nodes else ""
    # Slurm also reports JobLaunchFailure for a batch script that a signal has ended.
    if job.signal == NEVER_BEGAN or (job.reason == "JobLaunchFailure" and not job.signal):
        return (
            f"Slurm could not write {run.root}/logs{where}, and so did not start the job: the run directory must be "
            "on storage that every node mounts, and writable there"
        )
    if job.state in _ENDS:
        return _ENDS[job.state]
    log = run.root / "logs" / f"slurm-{job.id}.log"
    lines = [line for line in last_lines(log, 5) if line.strip()]
    said = f"; {log} ends with: {lines[-1].strip()}" if lines else ""
    if job.code in (126, 127):
        return (
            f"the job could not be started{where}: its Python, or what the prologue calls, is not there or may not be "
            f"run; it must be on storage that every node mounts (backends.slurm.python){said}"
        )
    how = f"was killed by {signal_name(job.signal)}" if job.signal else f"ended with exit code {job.code}"
    return f"the job's script {how}{where}{said}"
