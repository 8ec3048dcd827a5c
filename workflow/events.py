"""Events of a rank, one JSON object a line: the record that people and programs read.

Schema version 1 is documented in docs/events.md: a kind or a field may be added, none changes its meaning. Written
through, one write a line, so that a killed rank leaves every event it had. On resume the record is rewound to the
checkpoint: no step ever stands in it twice.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortflow.workflow.files import lines_of, mend_torn_line
from ortflow.workflow.record import EVENTS, damage_words, parse, rewrite
from ortflow.workflow.waiting import WaitingFile

SCHEMA_VERSION = 1
REWOUND = frozenset({"step", "evaluation", "skipped_step", "early_stop"})
"""Kinds that belong to a step and are written again when the step is repeated."""
MOST_OWED = 200_000
"""Events that wait for room on a full disk: some 50 MB of memory."""


class EventLog:
    """Appends events of one rank in one attempt; those that a full disk refuses wait until it takes them."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self.path, self.rank, self.attempt = path, rank, attempt
        self._file = WaitingFile(path, MOST_OWED)
        mend_torn_line(path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; non-finite numbers become null, because JSON has none."""
        record = {"event": event, "time": round(time.time(), 6), "attempt": self.attempt, "rank": self.rank}
        record.update({key: _plain(value) for key, value in fields.items()})
        self._file.append((json.dumps(record, separators=(",", ":")) + "\n").encode())
        self._say_what_is_lost()

    def catch_up(self) -> bool:
        """Write what a full disk has refused so far; whether nothing is owed any more."""
        self._say_what_is_lost()
        return self._file.catch_up()

    def _say_what_is_lost(self) -> None:
        if self._file.lost and self._file.catch_up():
            lost, self._file.lost = self._file.lost, 0
            self.write("warning", message=f"{lost} events are lost: the disk was full for too long")

    def rewind(self, step: int) -> None:
        """Take back what belongs to steps after `step`, and set aside what is not an event; says so in the record."""
        found = look_back(self.path, step)
        if found.damaged or found.newest is not None:
            self._file.close()
            try:
                take_back(self.path, step)
            finally:
                self._file.reopen()
        if found.newest is not None:
            self.write("rewind", from_step=found.newest, to_step=step, seconds=found.seconds)
        if words := damage_words(self.path, found.damaged, aside=True):
            warn(self, words)

    def close(self) -> None:
        """Close the file."""
        self.catch_up()
        self._file.close()


@dataclass(frozen=True)
class Lost:
    """What of a record belongs to steps that will be done again."""

    newest: int | None
    """The newest of those steps; None if there is none."""
    seconds: float
    """That they took."""
    damaged: list[int]
    """Numbers of the lines that are no events."""


def look_back(path: Path, step: int) -> Lost:
    """What a rewind to `step` takes out of a record, of which only one line is in memory. Raises OSError."""
    newest, seconds, damaged = None, 0.0, []
    for number, line in enumerate(lines_of(path), 1):
        record = parse(line, EVENTS)
        if record is None:
            damaged.append(number)
        elif _is_behind(record, step):
            newest = max(record["step"], newest or 0)
            seconds += record.get("seconds") or 0.0
    return Lost(newest, seconds, damaged)


def take_back(path: Path, step: int) -> None:
    """Write the record anew without what belongs to steps after `step`; what is not an event is set aside."""

    def keep(_: int, line: bytes) -> bytes | None:
        record = parse(line, EVENTS)
        if record is None:
            return None
        return b"" if _is_behind(record, step) else line

    rewrite(path, keep)


def _is_behind(record: Mapping[str, Any], step: int) -> bool:
    return record["event"] in REWOUND and record["step"] > step


def warn(events: EventLog, message: str) -> None:
    """Something a person should know, which the run survives: an event, and a line in the rank's log."""
    events.write("warning", message=message)
    print(f"warning: {message}", flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
