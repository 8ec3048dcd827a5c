"""Following a run that somebody else keeps going: its events, and what becomes of its place, until it ends.

Used by `ortflow submit --follow`. Reads only; whoever leaves here leaves the run alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.launchers.base import Launcher
from ortflow.launchers.records import Outcome, State, last_end, notes
from ortflow.launchers.status import RunStatus
from ortflow.launchers.supervisor import View
from ortflow.launchers.tail import EventTail
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER
from ortflow.workflow.rundir import RunDir

TICK = 0.25
LOOK = 3.0
"""Seconds between two looks at the status, which may cost a call to a scheduler."""

_LAST = ("finished", "preempted", "failure")
"""Events behind which the status is about to change."""
_CODES = {
    State.FINISHED: EXIT_DONE,
    State.PREEMPTED: EXIT_PREEMPTED,
    State.STOPPED: EXIT_PREEMPTED,
    State.CANCELLED: EXIT_PREEMPTED,
}


@dataclass(frozen=True)
class End:
    """How a followed run ended."""

    code: int
    """Of the design's table."""
    how: RunStatus


class Follower:
    """Made before the run is submitted, so that nothing of it is missed."""

    def __init__(self, run: RunDir, launcher: Launcher, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run, self._launcher, self._view, self._clock = run, launcher, view, clock
        self._tail = EventTail(run.events(0))
        self._said = ""
        self._notes: set[str] = set()
        """Of what changed for the run, those that were said."""

    def follow(self) -> End:
        """Pass on what the run tells until it ends."""
        due = 0.0
        self._notes = set(notes(self._run.read_attempts()))
        while True:
            how = None
            if self._clock.monotonic() >= due:
                how = self._launcher.status(self._run)
                self._say_changes()
                due = self._clock.monotonic() + LOOK
            for record in self._tail.read():
                self._view.record(record)
                if record.get("event") in _LAST:
                    due = min(due, self._clock.monotonic() + 2 * TICK)
            if how is not None:
                self._say(how)
                if not how.state.active:
                    self._tail.close()
                    return End(exit_code(how, self._run), how)
            self._view.tick()
            self._clock.sleep(TICK)

    def _say_changes(self) -> None:
        """What only the run's own directory tells, where that is not the record that lies here."""
        for note in notes(self._run.read_attempts()):
            if note not in self._notes:
                self._notes.add(note)
                self._view.say(note)

    def _say(self, how: RunStatus) -> None:
        """A line where the run's place has changed."""
        told = place_words(how)
        if told != self._said:
            self._said = told
            self._view.say(told)


def place_words(how: RunStatus) -> str:
    """Where a run is, in one line. Pure."""
    told = how.state.value
    if how.job is not None:
        told += f": job {how.job}"
    if how.state is State.RUNNING and how.nodes:
        told += f" on {how.nodes}"
    if how.waits:
        told += f", {how.waits}"
    if how.state is State.RESTARTING and how.cause:
        told += f" (last end: {how.cause})"
    return told


def exit_code(how: RunStatus, run: RunDir) -> int:
    """The exit code of the design's table for a run that has ended."""
    end = last_end(run.read_attempts()) or {}
    if how.state is State.FAILED and end.get("outcome") == Outcome.USER_ERROR.value:
        return EXIT_USER
    return _CODES.get(how.state, EXIT_FAILURE)
