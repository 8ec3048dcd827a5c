"""What attempts.jsonl says: pure functions over its records.

Written by whatever supervises the run. Five kinds of record: `submit` (a launcher took the run; `new_budget` when
failures before it no longer count), `start` and `end` of an attempt, `stop` (left without an attempt running), and
`changed` (keys of the run file that are others from the attempt to come on). An `end` tells the outcome, its cause, and
what comes `next`: restart or stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

CANCELS = ("cancel", "scancel")
"""Who asked, where nobody shall start the run again unasked."""

Records = Sequence[dict[str, Any]]


class State(str, Enum):
    """States of a run, whoever runs it."""

    PENDING = "pending"
    """Submitted; no rank has started yet."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """Between two attempts."""
    PREEMPTED = "preempted"
    """Saved and left because its place was wanted or its time was over; `ortflow resume` goes on."""
    STOPPED = "stopped"
    """Saved and left at its user's Ctrl-C; `ortflow resume` goes on."""
    FAILED = "failed"
    """Given up: wrong input, or the budget is spent."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its launcher is gone without a word; `ortflow resume` goes on."""

    @property
    def active(self) -> bool:
        """Somebody is at work on it, or will be without being asked."""
        return self in (State.PENDING, State.RUNNING, State.RESTARTING)


class Outcome(str, Enum):
    """How an attempt ended."""

    FINISHED = "finished"
    USER_ERROR = "user_error"
    PREEMPTED = "preempted"
    FAILURE = "failure"
    LOST = "lost"
    """The launcher died with it, or its node did."""


@dataclass(frozen=True)
class Used:
    """What of the two budgets is used."""

    failures: int = 0
    preemptions: int = 0


def next_attempt(records: Records) -> int:
    """The number of the attempt to come, from 0."""
    return 1 + max((record["attempt"] for record in records if record.get("event") == "start"), default=-1)


def used(records: Records) -> Used:
    """Failures and preemptions since the budgets were last renewed; a dead launcher counts against neither.

    `counts` False in a record: a time limit, a signal by hand, or a full disk.
    """
    failures = preemptions = 0
    for record in records:
        if record.get("event") == "submit" and record.get("new_budget"):
            failures = preemptions = 0
        elif record.get("event") == "end":
            counts = record.get("counts", True) is not False
            failures += counts and record.get("outcome") == Outcome.FAILURE
            preemptions += counts and record.get("outcome") == Outcome.PREEMPTED and record.get("next") == "restart"
    return Used(failures, preemptions)


def fruitless(records: Records) -> int:
    """How many of the newest attempts in a row ended where the one before them had; none where a person began anew."""
    count = 0
    step = None
    for record in reversed(records):
        if record.get("event") == "submit" and record.get("new_budget"):
            break
        if record.get("event") != "end":
            continue
        if step is not None and record.get("step") != step:
            break
        count, step = count + 1, record.get("step")
    return max(0, count - 1)


def pending_changes(records: Records) -> list[str]:
    """What the launcher found changed for the attempt to come, in words."""
    coming = next_attempt(records)
    changed = [r for r in records if r.get("event") == "changed" and r.get("attempt") == coming]
    return [str(note) for record in changed for note in record.get("notes", ())]


def notes(records: Records) -> list[str]:
    """What launchers have found changed so far, in words."""
    return [str(note) for r in records if r.get("event") == "changed" for note in r.get("notes", ())]


def open_attempt(records: Records) -> int | None:
    """The attempt that started and never ended."""
    for record in reversed(records):
        if record.get("event") == "end":
            return None
        if record.get("event") == "start":
            return int(record["attempt"])
    return None


def last_end(records: Records) -> dict[str, Any] | None:
    """The newest record that tells how an attempt, or the pause behind one, ended."""
    return next((record for record in reversed(records) if record.get("event") in ("end", "stop")), None)


def state(records: Records, alive: bool) -> State:
    """The run's state; `alive` says whether something supervises it now."""
    last = next((r for r in reversed(records) if r.get("event") in ("submit", "start", "end", "stop")), None)
    if last is None:
        return State.PENDING if alive else State.LOST
    if last["event"] == "stop" or (last["event"] == "end" and last.get("next") == "stop"):
        outcome = Outcome(last["outcome"])
        if outcome is Outcome.PREEMPTED:
            return _ASKED.get(last.get("asked") or "", State.PREEMPTED)
        return _FINAL[outcome]
    if not alive:
        return State.LOST
    return {"submit": State.PENDING, "start": State.RUNNING, "end": State.RESTARTING}[last["event"]]


_ASKED = {**dict.fromkeys(CANCELS, State.CANCELLED), "interrupt": State.STOPPED}
_FINAL = {
    Outcome.FINISHED: State.FINISHED,
    Outcome.USER_ERROR: State.FAILED,
    Outcome.FAILURE: State.FAILED,
    Outcome.LOST: State.LOST,
}
