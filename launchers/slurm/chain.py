"""Runs that come after other runs: from ortflow's names to Slurm's dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortflow.launchers.base import launcher_name
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import UserError
from ortflow.workflow.rundir import RunDir


def dependency(
    own: str | None, after: Sequence[RunDir], statuses: Callable[[Sequence[RunDir]], list[RunStatus]]
) -> str | None:
    """`own`, the run file's, and afterok of the jobs of the runs that have not finished yet; None if nothing is left.

    Raises UserError for a run that will not finish, or whose end Slurm does not see. Slurm itself takes a job that it
    no longer knows for one that has ended well, so only those in the queue are named.
    """
    for run in after:
        if (name := launcher_name(run.read_attempts())) != "slurm":
            raise UserError(f"{run.root} is not in Slurm but with the {name} launcher: no job can wait for it")
    jobs = [job for how in statuses(after) if (job := _job(how)) is not None]
    if not jobs:
        return own
    if own is not None and "?" in own:
        raise UserError(
            f"is {own}, an alternative, and cannot be joined with --after",
            where="backends.slurm.dependency",
            fix="use one of the two",
        )
    return ",".join([*([own] if own else []), "afterok:" + ":".join(jobs)])


def _job(how: RunStatus) -> str | None:
    """The job to wait for; None for a run that has finished."""
    if how.state is State.FINISHED:
        return None
    if how.state.active and how.job is not None and how.job_restarts is not None:
        return how.job
    if how.state.active:
        raise UserError(f"{how.directory} is {how.state.value}, and its job is not known: {how.waits}")
    raise UserError(
        f"{how.directory} is {how.state.value} and will not finish",
        fix=f"`ortflow resume {how.directory}` goes on with it; submit this run then",
    )
