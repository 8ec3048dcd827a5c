"""The state of a run and what happens next, in one sentence. Pure."""

from __future__ import annotations

from ortflow.launchers.records import State
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.status import RunStatus
from ortflow.launchers.view.lines import duration


def sentence(run: Survey) -> str:
    """The state and what happens next."""
    status = run.status
    return _SENTENCES[status.state](run, status, _position(status))


def _position(status: RunStatus) -> str:
    return f"step {status.step} of {status.total_steps}" if status.total_steps else f"step {status.step}"


def _pending(run: Survey, status: RunStatus, position: str) -> str:
    return f"{status.name} waits to start{_because(status.waits)}."


def _running(run: Survey, status: RunStatus, position: str) -> str:
    remaining = f", about {duration(status.seconds_left)} left" if status.seconds_left else ""
    doing = position if status.phase in (None, "train") else f"{status.phase}, {position}"
    if run.risk is None or (run.risk.checkpoint is None and not run.risk.steps):
        return f"{status.name} is running: {doing}{remaining}."
    saved = f"step {run.risk.checkpoint}" if run.risk.checkpoint else "the start"
    return f"{status.name} is running: {doing}{remaining}. If it were killed now, it would continue from {saved}."


def _restarting(run: Survey, status: RunStatus, position: str) -> str:
    saved = f" from step {status.checkpoint}" if status.checkpoint else ""
    return f"{status.name} starts again{saved}{_because(status.cause)}{_and(status.why)}{_and(status.waits)}."


def _stopped(run: Survey, status: RunStatus, position: str) -> str:
    return (
        f"{status.name} is {status.state.value} at {position}{_because(status.cause)}. {_resume(status)} continues it."
    )


def _failed(run: Survey, status: RunStatus, position: str) -> str:
    fix = f"Correct its cause; {_resume(status)} then continues it" + (
        f" from step {status.checkpoint}." if status.checkpoint else "."
    )
    return f"{status.name} has failed at {position}{_because(status.cause)}{_and(status.why)}. {fix}"


def _finished(run: Survey, status: RunStatus, position: str) -> str:
    model_text = f" The model is in {status.exported}." if status.exported else ""
    # A program may log no steps, and records may be lost.
    return f"{status.name} has finished{f' at {position}' if status.step else ''}.{model_text}"


def _lost(run: Survey, status: RunStatus, position: str) -> str:
    if not status.attempts:
        return f"{status.name} has no record of a start."
    return f"The launcher of {status.name} is gone, at {position}. {_resume(status)} continues it."


def _resume(status: RunStatus) -> str:
    return f"`ortflow resume {status.name}`"


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _and(reason: str | None) -> str:
    return f"; {reason}" if reason else ""


_SENTENCES = {
    State.PENDING: _pending,
    State.RUNNING: _running,
    State.RESTARTING: _restarting,
    State.PREEMPTED: _stopped,
    State.STOPPED: _stopped,
    State.CANCELLED: _stopped,
    State.FAILED: _failed,
    State.FINISHED: _finished,
    State.LOST: _lost,
}
