"""Following a run that another process supervises: its events, and the state of its job, until it ends.

Used by `ortflow submit --follow`. Reads only: the run continues if the follower is interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.launchers.attempts.tail import EventTail
from ortflow.launchers.base import Launcher
from ortflow.launchers.records import Outcome, State, last_end, notes
from ortflow.launchers.status import RunStatus
from ortflow.launchers.supervision.supervised import View
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

TICK = 0.25
POLL = 3.0
"""Seconds between two status queries, which may cost a call to a scheduler."""

_LAST = ("finished", "preempted", "failure")
"""Events after which the status is about to change."""
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
    """Exit code for the command line, see `exit_code`."""
    how: RunStatus


class Follower:
    """Shows a run until it ends. Make it before the run is submitted, so that no event is missed.

    Parameters
    ----------
    run
        The run directory, or the client's copy of its records.
    launcher
        Gives the status.
    view
        Where events and changes of the status are shown.
    clock
        The clock by which both are polled.
    """

    def __init__(self, run: RunDir, launcher: Launcher, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run, self._launcher, self._view, self._clock = run, launcher, view, clock
        self._tail = EventTail(run.events(0))
        self._shown = ""
        self._notes: set[str] = set()
        """Changes of the run file that were already shown."""

    def follow(self) -> End:
        """Show events and changes of the status until the run ends.

        Returns
        -------
        End
            The exit code and the final status.
        """
        due = 0.0
        self._notes = set(notes(self._run.read_attempts()))
        while True:
            run_status = None
            if self._clock.monotonic() >= due:
                run_status = self._launcher.status(self._run)
                self._print_changes()
                due = self._clock.monotonic() + POLL
            for record in self._tail.read():
                self._view.record(record)
                if record.get("event") in _LAST:
                    due = min(due, self._clock.monotonic() + 2 * TICK)
            if run_status is not None:
                self._print(run_status)
                if not run_status.state.active:
                    self._tail.close()
                    return End(exit_code(run_status, self._run), run_status)
            self._view.tick()
            self._clock.sleep(TICK)

    def _print_changes(self) -> None:
        """Show changes of the run file that were found on the backend."""
        for note in notes(self._run.read_attempts()):
            if note not in self._notes:
                self._notes.add(note)
                self._view.message(note)

    def _print(self, run_status: RunStatus) -> None:
        """Show the state of the job if it has changed."""
        line = format_place(run_status)
        if line != self._shown:
            self._shown = line
            self._view.message(line)


def format_place(run_status: RunStatus) -> str:
    """State, job and nodes of a run in one line. Pure."""
    line = run_status.state.value
    if run_status.job is not None:
        line += f": job {run_status.job}"
    if run_status.state is State.RUNNING and run_status.nodes:
        line += f" on {run_status.nodes}"
    if run_status.waits:
        line += f", {run_status.waits}"
    if run_status.state is State.RESTARTING and run_status.cause:
        line += f" (last end: {run_status.cause})"
    return line


def exit_code(run_status: RunStatus, run: RunDir) -> int:
    """Return the exit code for a run that has ended: 0 done, 2 wrong input, 75 preempted or stopped, otherwise 1."""
    end = last_end(run.read_attempts()) or {}
    if run_status.state is State.FAILED and end.get("outcome") == Outcome.USER_ERROR.value:
        return EXIT_USER
    return _CODES.get(run_status.state, EXIT_FAILURE)
