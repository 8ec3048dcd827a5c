"""A run that was preempted, or has ended and is to be restarted, and is not back. Sends its notices.

Nothing of a run may be alive while it waits in a queue. Three processes therefore look: the supervisor, if it lives;
where the scheduler can start one later, a job of seconds that the last supervisor has submitted
(`ortflow.launchers.absence`); and the next supervisor, which reports the return. Must not write records.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ortflow.launchers.attempts.tail import last_records
from ortflow.launchers.records import Outcome, Records
from ortflow.launchers.supervision.notices import Notices
from ortflow.launchers.view.lines import duration
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import read_whole

PERIOD = 1.0
"""Seconds between two looks at the clock."""
RETURNS = ("step", "program_start")
"""Events with which a run is back. Many programs log no steps."""


@dataclass(frozen=True)
class Absence:
    """The end of an attempt that another one is to follow, and after which no attempt has made a step."""

    attempt: int
    since: float
    """Unix time."""
    step: int
    cause: str
    lost: bool
    """The next supervisor has recorded the end, possibly hours later."""

    def ended_by(self, record: Mapping[str, Any]) -> bool:
        """Whether an event of rank 0 shows that the run is back."""
        return record.get("event") in RETURNS and int(record.get("attempt", -1)) > self.attempt


def absence(records: Records, returned: Collection[int] = ()) -> Absence | None:
    """The absence of a run since the last attempt that was back; None if the run is not to be restarted. Pure.

    `returned`: the attempts in which the run was back.
    """
    ends: list[dict[str, Any]] = []
    for record in reversed(records):
        if record.get("event") not in ("end", "stop"):
            continue
        if record["event"] == "stop" or record.get("next") != "restart" or "time" not in record:
            break
        # The events of an attempt that ended long ago may be more than are read.
        if ends and int(ends[-1].get("step") or 0) > int(record.get("step") or 0):
            break
        ends.append(record)
        if record["attempt"] in returned:
            break
    if not ends:
        return None
    end = ends[-1]
    return Absence(
        int(end["attempt"]),
        float(end["time"]),
        int(end.get("step") or 0),
        str(end.get("cause") or ""),
        lost=end.get("outcome") == Outcome.LOST.value,
    )


def current(run: RunDir) -> Absence | None:
    """The absence of a run that is not back yet; None if there is none."""
    events = last_records(run.events(0))
    gone = absence(run.read_attempts(), attempts_back(events))
    if gone is None or any(gone.ended_by(event) for event in events):
        return None
    times = [float(event["time"]) for event in events if event.get("attempt") == gone.attempt and "time" in event]
    return replace(gone, since=min(gone.since, max(times))) if gone.lost and times else gone


def attempts_back(events: Records) -> set[int]:
    """The attempts in which the run was back, by the newest events of rank 0. Pure."""
    back = {int(event.get("attempt", -1)) for event in events if event.get("event") in RETURNS}
    # A rewind has removed steps that are to be repeated, and names their attempts.
    rewinds = [event for event in events if event.get("event") == "rewind"]
    return back | {int(span[0]) for event in rewinds for span in event.get("spans") or ()}


class AbsenceNotices:
    """Sends `not_back` once for each absence and sink, and `back` at the return."""

    def __init__(self, sinks: Sequence[Notify], notices: Notices, run: RunDir, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limits = {n: sink.not_back_seconds for n, sink in enumerate(sinks) if "not_back" in sink.on}
        self._notices, self._run, self._clock = notices, run, clock
        self._absence: Absence | None = None
        self._next = 0.0

    def read(self) -> None:
        """An attempt has ended, or this process begins."""
        self._absence = current(self._run) if self._limits else None

    def look(self) -> None:
        """Send what is due."""
        gone, moment = self._absence, self._clock.monotonic()
        if gone is None or moment < self._next:
            return
        self._next = moment + PERIOD
        away = self._clock.time() - gone.since
        due = {sink for sink, limit in self._limits.items() if away >= limit}
        if due and (due := due - (sent := self._sent(gone))):
            self._note(gone, sent | due)
            text = f"not back {duration(away)} after attempt {gone.attempt} ended at step {gone.step} ({gone.cause})"
            self._notices.send("not_back", text, due, step=gone.step)

    def record(self, record: Mapping[str, Any]) -> None:
        """An event of rank 0: the return, perhaps."""
        gone = self._absence
        if gone is None or not gone.ended_by(record):
            return
        self._absence = None
        away = self._clock.time() - gone.since
        late = self._sent(gone) | {sink for sink, limit in self._limits.items() if away >= limit}
        if late:
            text = f"back {duration(away)} after attempt {gone.attempt} ended at step {gone.step} ({gone.cause})"
            self._notices.send("back", text, late, step=record.get("step", gone.step))

    def _sent(self, gone: Absence) -> set[int]:
        """The sinks that have had a message about this absence, from any process."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            noted = json.loads(read_whole(self._run.not_back))
            if noted["attempt"] == gone.attempt:
                return {int(sink) for sink in noted["sinks"]}
        return set()

    def _note(self, gone: Absence, sinks: set[int]) -> None:
        with suppress(OSError):  # a full disk: rather two messages than none
            write_atomically(self._run.not_back, json.dumps({"attempt": gone.attempt, "sinks": sorted(sinks)}).encode())
