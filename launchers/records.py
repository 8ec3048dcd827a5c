"""Pure functions over the records of attempts.jsonl.

Written by the run's supervisor. Six kinds of record: `submit` (a launcher accepted the run; `new_budget` if
earlier failures no longer count), `start` and `end` of an attempt, `stop` (stopped without a running attempt),
`changed` (keys of the run file that change from the next attempt on), and `retain` (`exclusion`). An `end` has the
outcome, its cause, and the `next` action: restart or stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

CANCELS = ("cancel", "scancel", "scheduler")
"""Requesters after which the run must not be restarted automatically: `ortflow cancel`, Slurm's command, another
scheduler's."""

Records = Sequence[dict[str, Any]]


class State(str, Enum):
    """States of a run, the same for all launchers."""

    PENDING = "pending"
    """Submitted; no rank has started yet."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """Between two attempts."""
    PREEMPTED = "preempted"
    """Saved and stopped by a preemption or the time limit; `ortflow resume` continues it."""
    STOPPED = "stopped"
    """Saved and stopped by the user's Ctrl-C; `ortflow resume` continues it."""
    FAILED = "failed"
    """Given up: wrong input, or the budget is spent."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its launcher is gone without a record; `ortflow resume` continues it."""

    @property
    def active(self) -> bool:
        """Whether it runs, or will run without a request."""
        return self in (State.PENDING, State.RUNNING, State.RESTARTING)


class Outcome(str, Enum):
    """How an attempt ended."""

    FINISHED = "finished"
    USER_ERROR = "user_error"
    PREEMPTED = "preempted"
    FAILURE = "failure"
    LOST = "lost"
    """The launcher or its node died."""


@dataclass(frozen=True)
class Used:
    """How much of the two budgets is used."""

    failures: int = 0
    preemptions: int = 0


def next_attempt(records: Records) -> int:
    """The number of the next attempt, from 0."""
    return 1 + max((record["attempt"] for record in records if record.get("event") == "start"), default=-1)


def used(records: Records) -> Used:
    """Failures and preemptions since the budgets were last reset; a dead launcher counts against neither.

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


def attempts_without_step(records: Records) -> int:
    """How many of the newest attempts in a row made no progress since the budgets were last reset."""
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
    """Messages about the changes that the launcher found for the next attempt."""
    coming = next_attempt(records)
    changed = [r for r in records if r.get("event") == "changed" and r.get("attempt") == coming]
    return [str(note) for record in changed for note in record.get("notes", ())]


def notes(records: Records) -> list[str]:
    """Messages about all changes that launchers have found so far."""
    return [str(note) for r in records if r.get("event") == "changed" for note in r.get("notes", ())]


def open_attempt(records: Records) -> int | None:
    """The attempt that started and has no end."""
    for record in reversed(records):
        if record.get("event") == "end":
            return None
        if record.get("event") == "start":
            return int(record["attempt"])
    return None


def elastic_ranks(records: Records) -> str | None:
    """Ranks and nodes of the newest attempt of an elastic run; None for another."""
    start = next((record for record in reversed(records) if record.get("event") == "start"), {})
    return f"{start.get('world_size')}, on {start['elastic']}" if start.get("elastic") else None


def elastic_nodes(records: Records) -> list[str] | None:
    """The nodes of the newest attempt of an elastic run; None for another."""
    start = next((record for record in reversed(records) if record.get("event") == "start"), {})
    return [str(name) for name in start["on"]] if isinstance(start.get("on"), list) else None


def last_end(records: Records) -> dict[str, Any] | None:
    """The newest record of how an attempt, or the pause after one, ended."""
    return next((record for record in reversed(records) if record.get("event") in ("end", "stop")), None)


def state(records: Records, alive: bool) -> State:
    """The run's state; `alive`: whether a process supervises it now."""
    last = next((r for r in reversed(records) if r.get("event") in ("submit", "start", "end", "stop")), None)
    if last is None:
        return State.PENDING if alive else State.LOST
    if last["event"] == "stop" or (last["event"] == "end" and last.get("next") == "stop"):
        outcome = Outcome(last["outcome"])
        if last.get("given_up"):
            return State.FAILED
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
