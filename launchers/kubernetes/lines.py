"""The three kinds of lines that a supervisor process prints (`log_stream`), read back from a pod's log. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ortflow.launchers.kubernetes.log_stream import MARK

FILES = ("attempts", "events", "plan", "notice")
_RANK = re.compile(r"\[(\d{1,7})\] (.*)", re.DOTALL)
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(?:Z|\+00:00) ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """A line of a rank's log, or (rank None) a message."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class Record:
    """A record of the run directory."""

    file: str
    """One of FILES."""
    record: dict[str, Any]
    again: bool = False
    """An earlier pod may have printed it."""


Line = Text | Record


def read_line(text: str) -> Line:
    """Parse one line of the log, without its time."""
    if text.startswith(MARK):
        try:
            data = json.loads(text[len(MARK) :])
        except (ValueError, RecursionError):
            return Text(None, text)
        if isinstance(data, dict) and isinstance(data.get("record"), dict) and data.get("file") in FILES:
            return Record(str(data["file"]), data["record"], data.get("again") is True)
        return Text(None, text)
    if match := _RANK.fullmatch(text):
        return Text(int(match[1]), match[2])
    return Text(None, text)


def stamped(line: bytes) -> tuple[str, str] | None:
    """Time, padded to a fixed length, and text of a line; None for a line without a time."""
    match = _STAMP.fullmatch(line)
    if match is None:
        return None
    fraction = (match[2] or b".")[1:].ljust(9, b"0")[:9]
    return f"{match[1].decode()}.{fraction.decode()}Z", match[3].decode(errors="replace")
