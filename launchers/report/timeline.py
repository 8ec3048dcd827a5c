"""One attempt's time as segments that touch each other, from rank 0's events. Pure.

Times are whole microseconds, so that sums are exact. Events have the clock of rank 0's node, and an attempt's start and
end the supervisor's: events are moved and cut so that they lie within the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ortflow.launchers.report.causes import Cause

MICRO = 1_000_000
_PHASES = {
    "configure": Cause.COMPILE,
    "runtime": Cause.START,
    "shard": Cause.START,
    "check": Cause.START,
    "train": Cause.OTHER,
    "checkpoint": Cause.SAVE,
    "monitor": Cause.OTHER,
    "export": Cause.EXPORT,
}
_SAVES = ("checkpoint_start", "checkpoint", "checkpoint_failed")


class Segment(NamedTuple):
    """A time with one cause."""

    start: int
    end: int
    cause: Cause


class Span(NamedTuple):
    """A time, in microseconds since 1970."""

    start: int
    end: int


@dataclass(frozen=True)
class Attempt:
    """An attempt's place in time; `end` is the present if it runs."""

    number: int
    start: int
    end: int
    running: bool = False
    clean: bool = False
    """It ended by itself: finished, or saved and stopped."""


@dataclass
class Timeline:
    """The segments of an attempt, from its start to its end."""

    segments: list[Segment] = field(default_factory=list)
    shift: int = 0
    """Microseconds that were added to rank 0's times."""
    stalls: int = 0
    """Within steps: training waited for a checkpoint."""
    data_waits: int = 0
    """Within steps: rank 0 waited for samples."""
    first_step: int | None = None
    """When the first step was done."""


def micro(seconds: object) -> int:
    """Whole microseconds; 0 for what is not a number."""
    return round(seconds * MICRO) if isinstance(seconds, (int, float)) else 0


def timeline(attempt: Attempt, events: Sequence[Mapping[str, Any]], lost: Iterable[Span] = ()) -> Timeline:
    """The segments of an attempt; `lost` are times, on rank 0's clock, of steps that were repeated later."""
    shift = _shift(attempt, events)
    spans = sorted(Span(start + shift, end + shift) for start, end in lost)
    return _Sweep(attempt, shift, spans).run(events)


def _shift(attempt: Attempt, events: Sequence[Mapping[str, Any]]) -> int:
    times = [micro(event["time"]) for event in (events[:1] and (events[0], events[-1])) if "time" in event]
    if not times:
        return 0
    first, last = min(times), max(times)
    if first < attempt.start:
        return attempt.start - first
    return max(attempt.start - first, attempt.end - last) if last > attempt.end else 0


class _Sweep:
    """Walks through the events in order; `at` is the end of what has been given a cause."""

    def __init__(self, attempt: Attempt, shift: int, lost: Sequence[Span]) -> None:
        self._attempt, self._shift, self._lost = attempt, shift, lost
        self._at, self._base = attempt.start, Cause.START
        self._in_train = self._program = self._saving = self._logs = False
        self._save_gap = 0
        """Time given to the save in progress between steps: a part of the wait that it reports."""
        self._line = Timeline(shift=shift)

    def run(self, events: Sequence[Mapping[str, Any]]) -> Timeline:
        """The whole attempt."""
        self._logs = any(event["event"] == "step" for event in events)
        for event in events:
            time = micro(event.get("time")) + self._shift
            self._take(event, min(max(time, self._at), self._attempt.end))
        if not events and not self._attempt.running:
            # Its ranks ended before rank 0 had begun.
            self._put(self._attempt.end, Cause.OTHER if self._attempt.clean else Cause.START)
        self._close()
        return self._line

    def _take(self, event: Mapping[str, Any], time: int) -> None:
        kind = event["event"]
        if kind == "step":
            self._step(event, time)
        elif kind in ("evaluation", "resume"):
            cause = Cause.RESTORE if kind == "resume" else Cause.LOST if event.get("lost") else Cause.EVALUATION
            self._fill(max(self._at, time - micro(event.get("seconds"))))
            self._put(time, cause)
            self._saving = False
        elif kind in _SAVES and self._in_train:
            self._saving = True
            self._fill(time)
            if kind == "checkpoint_start":
                self._save_gap = 0
            self._line.stalls += max(0, micro(event.get("stall_seconds")) - self._save_gap)
        elif kind == "phase_start":
            self._fill(time)
            self._in_train = event["phase"] == "train"
            self._base = _PHASES.get(event["phase"], Cause.OTHER)
        elif kind == "phase_end":
            self._fill(time)
            self._base, self._in_train, self._saving = Cause.OTHER, False, False
        elif kind == "program_start":
            self._program = True

    def _step(self, event: Mapping[str, Any], time: int) -> None:
        begun = time - micro(event.get("seconds"))
        if self._program:
            # A program logs when it likes: its steps take all time between two lines, its start that before the first.
            begun = time if self._line.first_step is None else self._at
        lost = bool(event.get("lost"))
        self._fill(max(self._at, begun))
        self._put(time, Cause.LOST if lost else Cause.STEP)
        self._saving = False
        if not lost:
            self._line.data_waits += micro(event.get("data_seconds"))
        if self._line.first_step is None:
            self._line.first_step = time

    def _fill(self, until: int) -> None:
        """Give the time up to `until`, which no event claims, to the phase, a save, or repeated steps."""
        if not self._in_train:
            self._put(until, self._base)
            return
        cause = Cause.SAVE if self._saving else Cause.OTHER
        if self._program and not self._saving:
            begins = Cause.START if self._logs else Cause.OTHER
            cause = begins if self._line.first_step is None else Cause.STEP
        self._around_lost(until, cause)

    def _around_lost(self, until: int, cause: Cause) -> None:
        for start, end in self._lost:
            if start < until and end > self._at:
                self._put(min(max(start, self._at), until), cause)
                self._put(min(end, until), Cause.LOST)
        self._put(until, cause)

    def _close(self) -> None:
        attempt = self._attempt
        if attempt.running:
            self._fill_running()
        else:
            self._around_lost(attempt.end, Cause.OTHER if attempt.clean else Cause.RECOVERY)

    def _fill_running(self) -> None:
        if self._in_train and self._line.first_step is not None and not self._saving:
            self._put(self._attempt.end, Cause.STEP)
        else:
            self._fill(self._attempt.end)

    def _put(self, until: int, cause: Cause) -> None:
        if until <= self._at:
            return
        if cause is Cause.SAVE:
            self._save_gap += until - self._at
        segments = self._line.segments
        if segments and segments[-1].cause is cause:
            segments[-1] = Segment(segments[-1].start, until, cause)
        else:
            segments.append(Segment(self._at, until, cause))
        self._at = until
