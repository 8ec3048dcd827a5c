"""Validation of the lines of event files and attempts.jsonl.

Readers skip an invalid line; the process that may write the file sets it aside (`set_aside`). Unknown kinds and fields
belong to a later version, and are kept. Pure except `read_records` and `set_aside`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import TypeAdapter

from ortflow.workflow.system.disk_space import short_write
from ortflow.workflow.system.files import lines_of, open_regular


@dataclass(frozen=True)
class Kind:
    """A kind of record: its type in `record_schema`, and the required fields of each event."""

    type: Literal["Event", "Attempt"]
    needs: Mapping[str, tuple[str, ...]]


EVENTS = Kind(
    "Event",
    {
        "attempt_start": ("pid",),
        "step": ("step",),
        "evaluation": ("step",),
        "skipped_step": ("step",),
        "early_stop": ("step",),
        "rewind": ("from_step", "to_step"),
        "resume": ("step",),
        "checkpoint": ("step",),
        "checkpoint_failed": ("step", "reason"),
        "finished": ("step",),
        "failure": ("reason",),
        "phase_start": ("phase",),
        "phase_end": ("phase",),
        "changed": ("key", "before", "now"),
    },
)
ATTEMPTS = Kind(
    "Attempt",
    {"start": ("attempt",), "end": ("attempt",), "stop": ("outcome",), "changed": ("attempt",)},
)


@functools.cache
def _adapter(name: str) -> TypeAdapter[dict[str, Any]]:
    from pydantic import TypeAdapter

    from ortflow.workflow.run import record_schema

    return TypeAdapter(getattr(record_schema, name))


def parse(line: bytes, kind: Kind) -> dict[str, Any] | None:
    """The record in a line; None if it is not a valid record of that kind. Pure."""
    try:
        record = _adapter(kind.type).validate_json(line)
    except ValueError:  # pydantic's ValidationError
        return None
    if any(field not in record for field in kind.needs.get(record["event"], ())):
        return None
    if record.get("next") == "stop" and "outcome" not in record:
        return None
    if record["event"] == "evaluation" and not all(map(_is_finite, record.values())):
        return None
    return record


def _is_finite(value: object) -> bool:
    """Whether a metric can be shown; NaN and infinite values are skipped."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def read_records(path: Path, kind: Kind) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a file, oldest first, and the numbers of invalid lines, from 1.

    Empty if the file does not exist. Raises OSError.
    """
    records, damaged = [], []
    try:
        for number, line in enumerate(lines_of(path), 1):
            record = parse(line, kind)
            if record is None:
                damaged.append(number)
            else:
                records.append(record)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    return records, damaged


def set_aside(path: Path, kind: Kind) -> list[int]:
    """Move invalid lines to the file with `.damaged` appended to its name; returns their numbers, from 1.

    Only for the process that may write the file. Raises OSError.
    """
    _, damaged = read_records(path, kind)
    if damaged:
        numbers = set(damaged)
        rewrite(path, lambda number, line: line if number not in numbers else None)
    return damaged


def rewrite(path: Path, keep: Callable[[int, bytes], bytes | None]) -> None:
    """Rewrite the file atomically with the result of `keep` for each numbered line; None moves the line to `.damaged`.

    Empty lines are dropped. Raises OSError.
    """
    from ortflow.workflow.run.rundir import replacing

    with replacing(path) as file:
        for number, line in enumerate(lines_of(path), 1):
            replacement = keep(number, line)
            if replacement is None:
                _append(path.with_name(f"{path.name}.damaged"), line + b"\n")
            elif replacement:
                file.write(replacement + b"\n")


def _append(path: Path, data: bytes) -> None:
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    try:
        if os.write(descriptor, data) != len(data):
            raise short_write(path, os.fstat(descriptor).st_size + 1)
    finally:
        os.close(descriptor)


def damage_message(path: Path, damaged: list[int], *, aside: bool = False) -> str | None:
    """The message about a file with invalid lines; None if there are none. Pure."""
    if not damaged:
        return None
    listed = ", ".join(map(str, damaged[:3])) + (f" and {len(damaged) - 3} more" if len(damaged) > 3 else "")
    many = len(damaged) > 1
    lines = f"line{'s' if many else ''} {listed} {'are not valid records' if many else 'is not a valid record'}"
    done = f"moved to {path.name}.damaged" if aside else "skipped"
    return f"{path}: {lines}, {done}"
