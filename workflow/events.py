"""Events of a rank, one JSON object a line: the record that people and programs read.

Schema version 1 is documented in docs/events.md: a kind or a field may be added, none changes its meaning. Written
through, one write a line, so that a killed rank leaves every event it had. On resume the record is rewound to the
checkpoint: no step ever stands in it twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from ortflow.workflow.rundir import read_json_lines, write_atomically

SCHEMA_VERSION = 1
REWOUND = frozenset({"step", "evaluation", "skipped_step", "early_stop"})
"""Kinds that belong to a step and are written again when the step is repeated."""


class EventLog:
    """Appends events of one rank in one attempt."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self.path, self.rank, self.attempt = path, rank, attempt
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        mend_torn_line(path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; non-finite numbers become null, because JSON has none."""
        record = {"event": event, "time": round(time.time(), 6), "attempt": self.attempt, "rank": self.rank}
        record.update({key: _plain(value) for key, value in fields.items()})
        os.write(self._descriptor, (json.dumps(record, separators=(",", ":")) + "\n").encode())

    def rewind(self, step: int) -> None:
        """Take back what belongs to steps after `step`; says so in the record."""
        records = read_json_lines(self.path)
        lost = [r for r in records if r["event"] in REWOUND and r.get("step", 0) > step]
        if not lost:
            return
        kept = [r for r in records if not (r["event"] in REWOUND and r.get("step", 0) > step)]
        lines = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in kept)
        os.close(self._descriptor)
        write_atomically(self.path, lines.encode())
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        seconds = sum(r.get("seconds") or 0.0 for r in lost)
        self.write("rewind", from_step=max(r["step"] for r in lost), to_step=step, seconds=seconds)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def warn(events: EventLog, message: str) -> None:
    """Something a person should know, which the run survives: an event, and a line in the rank's log."""
    events.write("warning", message=message)
    print(f"warning: {message}", flush=True)


def mend_torn_line(path: Path) -> None:
    """Cut off a last line that a power cut left without its end, so that the next event starts a line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
