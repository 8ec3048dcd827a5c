"""The state of a run and what happens next, in one sentence. Pure."""

from __future__ import annotations

from ortflow.launchers.lines import duration
from ortflow.launchers.records import State
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.status import RunStatus


def sentence(run: Survey) -> str:
    """The state and what happens next."""
    how = run.status
    return _SENTENCES[how.state](run, how, _position(how))


def _position(how: RunStatus) -> str:
    return f"step {how.step} of {how.total_steps}" if how.total_steps else f"step {how.step}"


def _pending(run: Survey, how: RunStatus, position: str) -> str:
    return f"{how.name} waits to start{_because(how.waits)}."


def _running(run: Survey, how: RunStatus, position: str) -> str:
    left = f", about {duration(how.seconds_left)} left" if how.seconds_left else ""
    doing = position if how.phase in (None, "train") else f"{how.phase}, {position}"
    if run.risk is None or (run.risk.checkpoint is None and not run.risk.steps):
        return f"{how.name} is running: {doing}{left}."
    saved = f"step {run.risk.checkpoint}" if run.risk.checkpoint else "the start"
    return f"{how.name} is running: {doing}{left}. If it were killed now, it would continue from {saved}."


def _restarting(run: Survey, how: RunStatus, position: str) -> str:
    saved = f" from step {how.checkpoint}" if how.checkpoint else ""
    return f"{how.name} starts again{saved}{_because(how.cause)}{_and(how.why)}{_and(how.waits)}."


def _stopped(run: Survey, how: RunStatus, position: str) -> str:
    return f"{how.name} is {how.state.value} at {position}{_because(how.cause)}. {_resume(how)} continues it."


def _failed(run: Survey, how: RunStatus, position: str) -> str:
    fix = f"Correct its cause; {_resume(how)} then continues it" + (
        f" from step {how.checkpoint}." if how.checkpoint else "."
    )
    return f"{how.name} has failed at {position}{_because(how.cause)}{_and(how.why)}. {fix}"


def _finished(run: Survey, how: RunStatus, position: str) -> str:
    made = f" The model is in {how.exported}." if how.exported else ""
    # A program may log no steps, and records may be lost.
    return f"{how.name} has finished{f' at {position}' if how.step else ''}.{made}"


def _lost(run: Survey, how: RunStatus, position: str) -> str:
    if not how.attempts:
        return f"{how.name} has no record of a start."
    return f"The launcher of {how.name} is gone, at {position}. {_resume(how)} continues it."


def _resume(how: RunStatus) -> str:
    return f"`ortflow resume {how.name}`"


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
