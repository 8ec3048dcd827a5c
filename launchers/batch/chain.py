"""Dependencies between runs: the jobs that a job must wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortflow.launchers.base import launcher_name
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import UserError
from ortflow.workflow.rundir import RunDir


def awaited(
    after: Sequence[RunDir], launcher: str, statuses: Callable[[Sequence[RunDir]], list[RunStatus]]
) -> list[str]:
    """The jobs of the runs that have not finished yet.

    Raises UserError for a run that will not finish, or that the launcher's scheduler does not manage. A scheduler may
    treat a job that it has forgotten as completed, so only jobs in the queue are named.
    """
    for run in after:
        if (name := launcher_name(run.read_attempts())) != launcher:
            raise UserError(f"{run.root} belongs to the launcher {name}, not {launcher}: no job can wait for it")
    return [job for how in statuses(after) if (job := _job(how)) is not None]


def _job(how: RunStatus) -> str | None:
    """The job to wait for; None for a run that has finished."""
    if how.state is State.FINISHED:
        return None
    if how.state.active and how.job is not None and how.job_restarts is not None:
        return how.job
    if how.state.active:
        raise UserError(f"{how.directory} is {how.state.value}, and its job is unknown: {how.waits}")
    raise UserError(
        f"{how.directory} is {how.state.value} and will not finish",
        fix=f"`ortflow resume {how.directory}` continues it; submit this run then",
    )
