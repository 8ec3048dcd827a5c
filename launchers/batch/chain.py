"""Dependencies between runs: the jobs that a job must wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortflow.launchers.base import launcher_name
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir


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
    return [job for status in statuses(after) if (job := _job(status)) is not None]


def _job(status: RunStatus) -> str | None:
    """The job to wait for; None for a run that has finished."""
    if status.state is State.FINISHED:
        return None
    if status.state.active and status.job is not None and status.job_restarts is not None:
        return status.job
    if status.state.active:
        raise UserError(f"{status.directory} is {status.state.value}, and its job is unknown: {status.waits}")
    raise UserError(
        f"{status.directory} is {status.state.value} and will not finish",
        fix=f"`ortflow resume {status.directory}` continues it; submit this run then",
    )
