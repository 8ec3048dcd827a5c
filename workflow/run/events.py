"""Events of a rank, one JSON object per line: the record that people and programs read.

Schema version 1 is documented in docs/events.md: kinds and fields may be added, but never change their meaning. An
event is one unbuffered write, so that a killed rank loses none; only the steps of the last moment are written together,
by a thread. On resume the record is rewound to the checkpoint, so that no step occurs twice.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortflow.workflow.run.record import EVENTS, damage_message, parse, rewrite
from ortflow.workflow.system.buffered_file import BufferedFile
from ortflow.workflow.system.files import lines_of, mend_torn_line

SCHEMA_VERSION = 1
REWOUND = frozenset({"step", "evaluation", "skipped_step", "early_stop", "lr_reduced"})
"""Kinds that belong to a step and are written again when the step is repeated."""
MOST_OWED = 200_000
"""Largest number of events that wait for space on a full disk: some 50 MB of memory."""
PERIOD = 0.2
"""Seconds of steps that are written together; a rank that is killed loses at most these."""


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_NUMBERS = frozenset({int, float})


@functools.lru_cache(256)
def _form(event: str, keys: tuple[str, ...]) -> str:
    """The line of an event with these keys; numbers and texts of JSON fill its places."""
    start = f'{{"event":{_ENCODER.encode(event)},"time":'.replace("%", "%%")
    rest = "".join(f",{_ENCODER.encode(key)}:".replace("%", "%%") + "%r" for key in keys)
    return f'{start}%.6f,"attempt":%d,"rank":%d{rest}}}\n'


class _Text(str):
    """JSON, as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(value: Any) -> str:
    """A value as JSON; non-finite numbers are null."""
    kind = type(value)
    if kind is int:
        return str(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else "null"
    return _ENCODER.encode(None if isinstance(value, float) and not math.isfinite(value) else value)


class EventLog:
    """Appends events of one rank in one attempt; events rejected by a full disk wait until it has space."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self.path, self.rank, self.attempt = path, rank, attempt
        self._file = BufferedFile(path, MOST_OWED)
        self._soon: deque[tuple[float, str, Any, Callable[[Any], Mapping[str, Any]]]] = deque()
        # Reentrant: a flush writes an event about those that are lost.
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem: OSError | None = None
        mend_torn_line(path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; non-finite numbers become null, because JSON has no such numbers. Raises OSError."""
        with self._lock:
            self._soon.append((time.time(), event, fields, dict))
            self._append()
            self._report_lost()

    def write_soon(self, event: str, row: Any, fields: Callable[[Any], Mapping[str, Any]]) -> None:
        """As `write`, within PERIOD seconds and in the order of the calls. Raises OSError.

        `fields` makes the event's fields of `row`, which must not change, when it is written. An event by itself takes
        80 us of a step whose computation has filled the caches, and a twentieth of that among others; its keyword
        arguments alone take 24 us there, and a tuple 3.
        """
        self._soon.append((time.time(), event, row, fields))
        if self._problem is not None or not self._starts_thread():
            self._problem = None
            self.flush()

    def _starts_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_periodically, name="events", daemon=True)
            with suppress(RuntimeError):  # a limit of threads: each event is then written by its caller
                self._thread.start()
        return self._thread.ident is not None

    def _write_periodically(self) -> None:
        while not self._end.wait(PERIOD):
            if self._soon:
                try:
                    self.flush()
                except OSError as problem:
                    self._problem = problem

    def _append(self) -> None:
        """Append the events that have not been; the lock is held."""
        lines = []
        while self._soon:
            moment, event, row, fields = self._soon.popleft()
            lines.append(self._line(moment, event, fields(row)))
        self._file.append(*lines)

    def _line(self, moment: float, event: str, fields: Mapping[str, Any]) -> bytes:
        values = fields.values()
        # Python's encoder takes 60 us for the event of a step whose computation has filled the caches; this, a third.
        # Of these types alone, repr is JSON: a bool, which is an int for isinstance, has another form there.
        if not (_NUMBERS.issuperset(map(type, values)) and math.isfinite(sum(values))):
            fields = {key: _Text(_text(value)) for key, value in fields.items()}
        line = _form(event, tuple(fields)) % (moment, self.attempt, self.rank, *fields.values())
        return line.encode()

    def flush(self) -> bool:
        """Write the events that wait; returns whether none is left. Raises OSError, except for a full disk."""
        with self._lock:
            self._append()
            self._report_lost()
            return self._file.flush()

    def _report_lost(self) -> None:
        if self._file.lost and self._file.flush():
            lost, self._file.lost = self._file.lost, 0
            self.write("warning", message=f"{lost} events are lost: the disk was full for too long")

    def rewind(self, step: int, *, to_save: bool = False) -> None:
        """Remove the records of steps after `step`, and set aside lines that are not events; records that, too.

        `to_save`: those after the save of `step`, whatever their number: programs count their steps as they like.
        """
        start = line_of_save(self.path, step) if to_save else None
        lost_steps = find_lost(self.path, step, start)
        if lost_steps.damaged or lost_steps.newest is not None:
            self._file.close()
            try:
                discard_lost(self.path, step, start)
            finally:
                self._file.reopen()
        if lost_steps.newest is not None:
            fields = {"to_save": True} if to_save else {}
            self.write(
                "rewind", from_step=max(lost_steps.newest, step + 1), to_step=step, seconds=lost_steps.seconds,
                spans=[[attempt, *span] for attempt, span in lost_steps.spans.items()], **fields,
            )  # fmt: skip
        if message := damage_message(self.path, lost_steps.damaged, aside=True):
            warn(self, message)

    def close(self) -> None:
        """Write all events, and close the file."""
        self._end.set()
        with self._lock:
            try:
                self.flush()
            finally:
                self._file.close()


@dataclass(frozen=True)
class Lost:
    """The part of a record that belongs to steps that will be repeated."""

    newest: int | None
    """The newest of these steps; None if there is none."""
    seconds: float
    """Seconds that they took."""
    damaged: list[int]
    """Numbers of the lines that are not events."""
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When the steps of each attempt ran: from the start of the first to the end of the last, in Unix time."""


def line_of_save(path: Path, step: int) -> int | None:
    """Number of the line with which the newest save of `step` began; 0 for step 0; None if there is none."""
    if step == 0:
        return 0
    save_line = None
    for number, line in enumerate(lines_of(path), 1):
        if b'"checkpoint_start"' in line:
            record = parse(line, EVENTS)
            if record is not None and record["event"] == "checkpoint_start" and record["step"] == step:
                save_line = number
    return save_line


def find_lost(path: Path, step: int, start: int | None = None) -> Lost:
    """Determine what a rewind to `step` removes from a record; holds one line in memory at a time. Raises OSError.

    With `start`, it removes the records of steps behind this line, and no others.
    """
    newest, seconds, damaged = None, 0.0, []
    spans: dict[int, tuple[float, float]] = {}
    for number, line in enumerate(lines_of(path), 1):
        record = parse(line, EVENTS)
        if record is None:
            damaged.append(number)
        elif _is_behind(record, step, number, start):
            newest = max(record["step"], newest or 0)
            seconds += record.get("seconds") or 0.0
            if "time" in record:
                end, attempt = record["time"], record.get("attempt", 0)
                since = spans[attempt][0] if attempt in spans else end - (record.get("seconds") or 0.0)
                spans[attempt] = (round(since, 6), end)
    return Lost(newest, seconds, damaged, spans)


def discard_lost(path: Path, step: int, start: int | None = None) -> None:
    """Rewrite the record without what `find_lost` determines; lines that are not events are set aside."""

    def keep(number: int, line: bytes) -> bytes | None:
        record = parse(line, EVENTS)
        if record is None:
            return None
        return b"" if _is_behind(record, step, number, start) else line

    rewrite(path, keep)


def _is_behind(record: Mapping[str, Any], step: int, number: int, start: int | None) -> bool:
    return record["event"] in REWOUND and (record["step"] > step if start is None else number > start)


def warn(events: EventLog, message: str) -> None:
    """Report a warning: an event, and a line in the rank's log."""
    events.write("warning", message=message)
    print(f"warning: {message}", flush=True)
