"""Cancelling all runs of a sweep: pending ones leave the queue together, running ones save and stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortflow.launchers.batch.history import find, is_settled, placed
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.launcher import SlurmLauncher, record_cancelled
from ortflow.launchers.stop import write_request
from ortflow.workflow.rundir import RunDir


def cancel(runs: Sequence[RunDir], slurm: Slurm, *, now: bool) -> int:
    """Ask the runs to end, as `SlurmLauncher.cancel` does for one; returns how many were active. Raises NoAnswer."""
    jobs = _active(runs, slurm)
    waiting = {task: job for task, job in jobs.items() if job.waits}
    if waiting:
        # Held jobs are in a state that --state=PENDING does not match.
        slurm.cancel(*(job.id for job in waiting.values() if job.state == "PENDING"), pending=True)
        left = _active(runs, slurm)
        held = {task: job for task, job in left.items() if job.waits}
        slurm.cancel(*(job.id for job in held.values()))
        for task in waiting.keys() - (left.keys() - held.keys()):
            record_cancelled(runs[task])
        at_work: Mapping[int, Job] = {task: job for task, job in left.items() if not job.waits}
    else:
        at_work = jobs
    for task in at_work:
        write_request(runs[task].stop_request, "cancel", now=now)
    if now or any(job.state in ("SUSPENDED", "STOPPED") for job in at_work.values()):
        # They are already stopping: waiting for one after the other costs no time.
        launcher = SlurmLauncher(slurm)
        for task in at_work:
            launcher.cancel(runs[task], now=now)
    return len(jobs)


def _active(runs: Sequence[RunDir], slurm: Slurm) -> dict[int, Job]:
    """The jobs of unfinished runs, by task."""
    mine = slurm.mine()
    found: dict[int, Job] = {}
    for task, run in enumerate(runs):
        records = run.read_attempts()
        job = find(placed(records, "slurm"), mine)
        if job is not None and job.active and not is_settled(records):
            found[task] = job
    return found
