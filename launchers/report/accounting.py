"""A run's wall time by cause, from the supervisor's records and rank 0's events. Pure.

The parts add up to the wall time exactly. Time in which a run was stopped and nobody had asked to continue it is not
part of the wall time; it is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.timeline import MICRO, Attempt, Segment, Span, Timeline, micro, timeline

Records = Sequence[Mapping[str, Any]]
CLOCKS_DIFFER = 2 * MICRO
"""Difference of two nodes' clocks from which it is reported."""


@dataclass
class Account:
    """The wall time of a run; all times in microseconds."""

    start: int = 0
    end: int = 0
    stopped: int = 0
    """Stopped, or given up, until it was submitted again."""
    totals: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    segments: list[Segment] = field(default_factory=list)
    """In order; with gaps where the run was stopped. Waits within steps are part of their steps here."""
    attempts: list[Attempt] = field(default_factory=list)
    lines: dict[int, Timeline] = field(default_factory=dict)
    """By attempt."""
    notes: list[str] = field(default_factory=list)
    measured: bool = True
    """Whether its steps are known: a program may log none."""

    @property
    def wall(self) -> int:
        """Time that the run wanted to make progress: the sum of `totals`."""
        return self.end - self.start - self.stopped

    @property
    def goodput(self) -> float | None:
        """The fraction of the wall time in productive steps; None without wall time, or if no step was logged."""
        return self.totals[Cause.STEP] / self.wall if self.wall > 0 and self.measured else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, in seconds."""
        return {
            "wall_seconds": self.wall / MICRO,
            "stopped_seconds": self.stopped / MICRO,
            "goodput": self.goodput,
            "seconds": {cause.value: self.totals[cause] / MICRO for cause in Cause},
            "notes": self.notes,
        }


def account(
    records: Records, events: Records, *, now: float, alive: bool, waits: Mapping[int, int] | None = None
) -> Account:
    """The account of a run.

    Parameters
    ----------
    records
        Those of attempts.jsonl, oldest first.
    events
        Rank 0's, oldest first; empty if its file is missing.
    now
        Unix time; the end of a run that is active.
    alive
        Whether a launcher supervises the run.
    waits
        By attempt, how much longer than rank 0 the slowest rank waited for data, in microseconds.
    """
    account_of_run = Account()
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        by_attempt.setdefault(int(event.get("attempt", 0)), []).append(event)
    account_of_run.attempts = _attempts(records, by_attempt, micro(now), alive)
    lost = _lost_spans(by_attempt)
    saved = newest_checkpoint(events)
    for attempt in account_of_run.attempts:
        own_events = by_attempt.get(attempt.number, [])
        line = timeline(attempt, _marked(attempt, own_events, saved), lost.get(attempt.number, ()))
        account_of_run.lines[attempt.number] = line
        if abs(line.shift) >= CLOCKS_DIFFER:
            account_of_run.notes.append(
                f"attempt {attempt.number}: the clock of rank 0's node differs from the launcher's by "
                f"{abs(line.shift) / MICRO:.0f} s"
            )
    kinds = {event["event"] for event in events}
    if "program_start" in kinds and "step" not in kinds:
        account_of_run.measured = False
        account_of_run.notes.append("the program logs no steps, so that its productive time is unknown")
    _check_steps(account_of_run, records, events)
    _join(account_of_run, records, micro(now), alive)
    for segment in account_of_run.segments:
        account_of_run.totals[segment.cause] += segment.end - segment.start
    _move_waits(account_of_run, waits or {})
    return account_of_run


def _check_steps(run_account: Account, records: Records, events: Records) -> None:
    """Say if nothing is known of steps that were done: their time would be shown as that of another cause."""
    steps = [event for event in events if event["event"] == "step"]
    done = any(record.get("outcome") == "finished" or record.get("step") for record in records)
    if not events and done:
        run_account.measured = False
        run_account.notes.append("the events of rank 0 are missing, so that its productive time is unknown")
    elif steps and not any(event.get("seconds") for event in steps):
        run_account.measured = False
        run_account.notes.append("its steps are recorded without their time, so that its productive time is unknown")
    if not records:
        run_account.notes.append("attempts.jsonl is missing or empty, so that its wall time is unknown")


def _attempts(records: Records, by_attempt: Mapping[int, Records], now: int, alive: bool) -> list[Attempt]:
    """Every attempt with a start; one whose end nobody recorded ends with its last event, or now."""
    attempts: list[Attempt] = []
    starts = [record for record in records if record.get("event") == "start" and "time" in record]
    ends = {int(record["attempt"]): record for record in records if record.get("event") == "end"}
    for place, record in enumerate(starts):
        number = int(record["attempt"])
        start = max(micro(record["time"]), attempts[-1].end if attempts else 0)
        limit = micro(starts[place + 1]["time"]) if place + 1 < len(starts) else now
        own_events = by_attempt.get(number, ())
        end = ends.get(number)
        running = end is None and alive and place + 1 == len(starts)
        if end is not None and end.get("outcome") != "lost" and "time" in end:
            until = micro(end["time"])
        elif running:
            until = now
        else:
            # Who notices that a launcher has died may do so days later.
            until = min(limit, micro(own_events[-1].get("time"))) if own_events else start
        attempts.append(Attempt(number, start, max(start, until), running, _clean(own_events, end)))
    return attempts


def _clean(own_events: Records, end: Mapping[str, Any] | None) -> bool:
    if any(event["event"] == "finished" for event in own_events[-3:]):
        return True
    if any(event["event"] == "preempted" for event in own_events[-3:]):
        return all(event.get("saved", True) for event in own_events[-3:])
    return end is not None and end.get("outcome") in ("finished", "user_error")


def _lost_spans(by_attempt: Mapping[int, Records]) -> dict[int, list[Span]]:
    """By attempt, the times of steps that later attempts removed from the record."""
    spans: dict[int, list[Span]] = {}
    for number, events in by_attempt.items():
        for event in events:
            if event["event"] == "rewind":
                for attempt, since, until in _spans(event, by_attempt.get(number - 1, ())):
                    spans.setdefault(attempt, []).append(Span(since, until))
    return spans


def _spans(event: Mapping[str, Any], before: Records) -> list[tuple[int, int, int]]:
    spans = event.get("spans")
    if isinstance(spans, list):
        return [
            (int(span[0]), micro(span[1]), micro(span[2]))
            for span in spans
            if isinstance(span, list) and len(span) == 3
        ]
    # A version without spans recorded only how long the steps took.
    last = next(
        (micro(record.get("time")) for record in reversed(before) if record["event"] in ("step", "evaluation")), None
    )
    if last is None:
        return []
    return [(int(event.get("attempt", 1)) - 1, last, last + micro(event.get("seconds")))]


def newest_checkpoint(events: Records) -> int | None:
    """The newest checkpoint's step; 0 if an ONNX run has none, None if a program saves without a record."""
    newest = None
    for event in events:
        if event["event"] in ("checkpoint", "resume"):
            newest = int(event["step"])
        elif event["event"] == "program_start" and newest is None:
            newest = -1
    return 0 if newest is None else newest if newest >= 0 else None


def _marked(attempt: Attempt, events: Records, saved: int | None) -> Records:
    """The events, with steps that ended attempts did not save marked as lost."""
    if attempt.running or attempt.clean or saved is None:
        return events
    return [
        {**event, "lost": True} if event["event"] in ("step", "evaluation") and event["step"] > saved else event
        for event in events
    ]


def _join(run_account: Account, records: Records, now: int, alive: bool) -> None:
    """Put the attempts one after the other, with the waits between them."""
    times = [micro(record["time"]) for record in records if "time" in record]
    run_account.start = min(times, default=0)
    at = run_account.start
    submits = [micro(record["time"]) for record in records if record.get("event") == "submit" and "time" in record]
    stops = {
        int(record.get("attempt", -1))
        for record in records
        if record.get("event") == "end" and record.get("next") == "stop"
    }
    stopped_at = [micro(record["time"]) for record in records if record.get("event") == "stop" and "time" in record]
    waiting = Cause.QUEUE
    previous: int | None = None
    for attempt in run_account.attempts:
        at = _between(
            run_account, at, attempt.start, waiting, _resumed(at, attempt.start, submits, stopped_at, previous, stops)
        )
        run_account.segments += run_account.lines[attempt.number].segments
        at, waiting, previous = attempt.end, Cause.RECOVERY, attempt.number
    if run_account.attempts and run_account.attempts[-1].running:
        run_account.end = at
        return
    resumed = _resumed(at, now, submits, stopped_at, previous, stops)
    if resumed is not None or (alive and (previous is None or previous not in stops)):
        at = _between(run_account, at, now, waiting, resumed)
    run_account.end = max(at, run_account.start)


def _resumed(
    since: int, until: int, submits: Sequence[int], stopped_at: Sequence[int], previous: int | None, stops: set[int]
) -> tuple[int, int] | None:
    """When the run was stopped between two attempts, and when it was submitted again."""
    again = [time for time in submits if since <= time <= until]
    if previous is None or not again:
        return None
    if previous in stops:
        return since, again[-1]
    pauses = [time for time in stopped_at if since <= time <= again[-1]]
    return (pauses[0], again[-1]) if pauses else None


def _between(run_account: Account, at: int, until: int, cause: Cause, pause: tuple[int, int] | None) -> int:
    if until <= at:
        return at
    if pause is None:
        run_account.segments.append(Segment(at, until, cause))
        return until
    stopped, again = pause
    if stopped > at:
        run_account.segments.append(Segment(at, stopped, cause))
    run_account.stopped += again - stopped
    if until > again:
        run_account.segments.append(Segment(again, until, Cause.QUEUE))
    return until


def _move_waits(run_account: Account, waits: Mapping[int, int]) -> None:
    """Waits within steps count as what they were for."""
    for number, line in run_account.lines.items():
        for cause, waited in (
            (Cause.SAVE, line.stalls),
            (Cause.DATA_WAIT, line.data_waits + max(0, waits.get(number, 0))),
        ):
            moved = min(waited, run_account.totals[Cause.STEP])
            run_account.totals[Cause.STEP] -= moved
            run_account.totals[cause] += moved
