"""How a run in Slurm is: what its directory tells, and what Slurm adds. Pure but for reading the directory.

The directory is the truth about the run; Slurm alone knows why it waits, where it runs, and what became of a job that
ended without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ortflow.launchers.batch.history import SETTLE, Placed, belongs, find, in_doubt, in_order, is_settled, placed
from ortflow.launchers.cause import signal_name
from ortflow.launchers.records import State
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.reasons import left_in_queue, never_starts, waits
from ortflow.launchers.status import RunStatus, read_status
from ortflow.launchers.tail import last_lines
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.rundir import RunDir

NEVER_BEGAN = 53
"""The signal that Slurm reports where it could not even open the job's output."""
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
    """The run's status, `jobs` being this user's; None where Slurm does not answer, which `silence` explains.

    `remember` finds a job that is not among them by its id; asked only for one that has left without a word.
    A run that has ended may still have a job in the queue: a controller that died had not stored its start.
    """
    # Read behind the queue: a run that ends in between has said so here before its job leaves there.
    records = in_order(run.read_attempts())
    settled = is_settled(records)
    history = placed(records, "slurm")
    job = find(history, jobs or ())
    last = _newest(history)
    if job is None and last is not None and jobs is not None and not settled:
        job = remember(last)
    alive = jobs is None or (job is not None and job.active)
    told = read_status(run, records=records, alive=alive)
    told = replace(told, launcher="slurm", job=job.id if job else last)
    if settled:
        if job is None or not job.waits:
            return told
        return replace(told, waits=left_in_queue(job), job_restarts=job.restarts)
    if jobs is None:
        return replace(told, waits=silence)
    if job is not None and job.active:
        return _active(told, job)
    return replace(told, **_lost(run, records, job, last, clock.time()))


def _newest(history: Sequence[Placed]) -> str | None:
    return next((one.job for one in reversed(history) if one.job is not None), None)


def _active(told: RunStatus, job: Job) -> RunStatus:
    # Of a job whose submission had no answer the directory knows nothing yet.
    found = told.state if told.state.active else State.PENDING
    told = replace(told, state=found, job_restarts=job.restarts, nodes=job.nodes or None)
    if job.waits:
        # Whatever the directory says of an attempt: Slurm has none of the run's processes now.
        found = State.PENDING if found is State.PENDING else State.RESTARTING
        # Slurm keeps the time that it expected before it was held, or the last one.
        starts = None if never_starts(job) else job.start
        return replace(told, state=found, phase=None, seconds_left=None, waits=waits(job), starts_at=starts)
    if job.state == "COMPLETING":
        return replace(told, nodes=None, waits="Slurm ends the job, to restart it or finally")
    told = replace(told, job_ends_at=job.end)
    if job.state in ("SUSPENDED", "STOPPED"):
        return replace(told, waits="Slurm has suspended it")
    if job.state == "CONFIGURING":
        return replace(told, waits="its nodes are being prepared")
    if told.state is State.PENDING:
        return replace(told, waits="the job has begun, its first attempt has not")
    return told


def _lost(
    run: RunDir, records: Sequence[dict[str, Any]], job: Job | None, last: str | None, now: float
) -> dict[str, Any]:
    """State and cause of a run whose job is gone, and whose directory does not say how it ended; `now`: Unix time."""
    since = in_doubt(records)
    if since is not None and (job is None or not belongs(job, placed(records, "slurm")[-1])):
        # Whoever has called sbatch may have another clock: a time to come is as good as one long past.
        if abs(now - since) < SETTLE:
            return {"state": State.PENDING, "waits": "sbatch did not answer: the job may still enter the queue"}
        return {"state": State.LOST, "cause": "the job did not enter the queue: submit it again"}
    if job is not None and job.state == "CANCELLED":
        return {"state": State.CANCELLED, "cause": _cancelled(job)}
    return {"state": State.LOST, "cause": _ending(run, job, last), "nodes": (job.nodes or None) if job else None}


def _cancelled(job: Job) -> str:
    if job.reason == "DependencyNeverSatisfied":
        return "Slurm removed the job: its dependency did not end as required"
    return f"job {job.id} was cancelled in Slurm" + (f" {job.reason}" if job.reason.startswith("by ") else "")


def _ending(run: RunDir, job: Job | None, last: str | None) -> str:
    if job is None:
        return f"Slurm no longer knows of job {last}, and it left no record"
    where = f" on {job.nodes}" if job.nodes else ""
    # Slurm gives JobLaunchFailure for a batch script that a signal has ended, too.
    if job.signal == NEVER_BEGAN or (job.reason == "JobLaunchFailure" and not job.signal):
        return (
            f"Slurm could not write {run.root}/logs{where}, and so did not start the job: the run directory must lie "
            "where every node sees it, and be writable there"
        )
    if job.state in _ENDS:
        return _ENDS[job.state]
    log = run.root / "logs" / f"slurm-{job.id}.log"
    lines = [line for line in last_lines(log, 5) if line.strip()]
    said = f"; {log} ends with: {lines[-1].strip()}" if lines else ""
    if job.code in (126, 127):
        return (
            f"the job could not be started{where}: its Python, or what the prologue calls, is not there or may not be "
            f"run; it must lie where every node sees it (backends.slurm.python){said}"
        )
    how = f"was killed by {signal_name(job.signal)}" if job.signal else f"ended with exit code {job.code}"
    return f"the job's script {how}{where}{said}"
