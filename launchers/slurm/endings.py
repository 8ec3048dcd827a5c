"""How a Slurm job ended that left no record in its run directory. Pure, except for the end of the job's log."""

from __future__ import annotations

from ortflow.launchers.attempts.tail import last_lines
from ortflow.launchers.records import last_end, open_attempt
from ortflow.launchers.slurm.jobs import Job
from ortflow.workflow.errors import signal_name
from ortflow.workflow.run.rundir import RunDir

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


def cancelled(job: Job) -> str | None:
    """How a job was cancelled; None if it was not."""
    if job.state != "CANCELLED":
        return None
    if job.reason == "DependencyNeverSatisfied":
        return "Slurm removed the job: its dependency did not end as required"
    return f"job {job.id} was cancelled in Slurm" + (f" {job.reason}" if job.reason.startswith("by ") else "")


def ending(run: RunDir, job: Job | None, last: str | None) -> str:
    """How the job ended; `last` is its id, if Slurm has forgotten it."""
    if job is None:
        return f"Slurm no longer knows of job {last}, and it left no record"
    place = f" on {job.nodes}" if job.nodes else ""
    # Slurm also reports JobLaunchFailure for a batch script that a signal has ended.
    if job.signal == NEVER_BEGAN or (job.reason == "JobLaunchFailure" and not job.signal):
        return (
            f"Slurm could not write {run.root}/logs{place}, and so did not start the job: the run directory must be "
            "on storage that every node mounts, and writable there"
        )
    records = run.read_attempts()
    end = last_end(records)
    if job.state == "TIMEOUT" and end is not None and end.get("next") == "restart" and open_attempt(records) is None:
        # On a node without scontrol and sbatch, or under a controller that was away until the end.
        return f"the ranks had saved at step {end.get('step')}, and the job{place} could not have itself queued again"
    if job.state in _ENDS:
        return _ENDS[job.state]
    log = run.root / "logs" / f"slurm-{job.id}.log"
    lines = [line for line in last_lines(log, 5) if line.strip()]
    log_end = f"; {log} ends with: {lines[-1].strip()}" if lines else ""
    if job.code in (126, 127):
        return (
            f"the job could not be started{place}: its Python, or what the prologue calls, is not there or may not be "
            f"run; it must be on storage that every node mounts (backends.slurm.python){log_end}"
        )
    end_text = f"was killed by {signal_name(job.signal)}" if job.signal else f"ended with exit code {job.code}"
    return f"the job's script {end_text}{place}{log_end}"
