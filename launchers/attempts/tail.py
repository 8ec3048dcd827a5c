"""Follows files that other processes write: events and logs. Read only; cheap enough to call ten times a second."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ortflow.workflow.run.record import EVENTS, parse
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import LONGEST_LINE, open_regular

PIECE = 4 << 20
"""Bytes per read."""
_MANY = (b'{"event":"step"', b'{"event":"phase_')
"""Start of the most frequent lines."""


class LineTail:
    """New whole lines of a file that may not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.replaced = False
        """Whether the last `read` found another file under the name and started at its beginning."""
        self._rest = b""
        self._file = self._open()
        if from_end and self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def _open(self) -> BinaryIO | None:
        try:
            return os.fdopen(open_regular(self.path), "rb")
        except OSError:
            return None

    def read(self, limit: int = -1) -> list[bytes]:
        """The lines since the last call, without line ends; with a `limit`, from at most so many bytes.

        A line that is longer than any of ortflow's is cut.
        """
        self.replaced = False
        if self._file is not None and self._is_other_file(self._file):
            self._file.close()
            self._file, self._rest, self.replaced = None, b"", True
        if self._file is None:
            self._file = self._open()
        data = self._file.read(limit) if self._file is not None else b""
        if not data:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        return lines

    def rest(self) -> bytes:
        """Return and remove the text after the last whole line."""
        rest, self._rest = self._rest, b""
        return rest

    def _is_other_file(self, file: BinaryIO) -> bool:
        try:
            now, opened_status = self.path.stat(), os.fstat(file.fileno())
        except OSError:
            return False
        return (now.st_dev, now.st_ino) != (opened_status.st_dev, opened_status.st_ino)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class EventTail:
    """New records of an event file. A rank that rewinds its record replaces the file: no record is returned twice."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path, from_end=True)
        self._newest = (-1, 0.0)

    def read(self) -> list[dict[str, Any]]:
        """The records since the last call."""
        records = []
        for line in self._lines.read():
            record = _record(line)
            if record is None:
                continue
            moment = (int(record.get("attempt", 0)), float(record.get("time", 0.0)))
            if self._lines.replaced and moment <= self._newest:
                continue
            self._newest = max(self._newest, moment)
            records.append(record)
        return records

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def last_lines(path: Path, count: int, limit: int = 1 << 16) -> list[str]:
    """The last lines of a text file, from its last `limit` bytes; none if there is no such file."""
    return [line.decode(errors="replace") for line in last_bytes(path, limit).splitlines()[-count:]]


def last_records(path: Path, limit: int = 1 << 16, *, attempt: int | None = None) -> list[dict[str, Any]]:
    """The records in the last `limit` bytes of an event file, oldest first; of one `attempt` if given."""
    records = (_record(line) for line in last_bytes(path, limit).splitlines())
    return [record for record in records if record is not None and attempt in (None, record.get("attempt"))]


def newest(
    run: RunDir, attempt: int, ranks: Iterable[int], *events: str, limit: int = 1 << 16
) -> dict[int, dict[str, Any]]:
    """The newest of these events of each rank in an attempt, if it has one in the last `limit` bytes of its record."""
    records = {}
    for rank in ranks:
        for record in last_records(run.events(rank), limit, attempt=attempt):
            if record.get("event") in events:
                records[rank] = record
    return records


def ends_of(run: RunDir, attempt: int, ranks: Iterable[int]) -> dict[int, str]:
    """How each rank has ended in an attempt by its own record, `finished` or `preempted`; others are left out."""
    return {
        rank: str(record["event"])
        for rank, record in newest(run, attempt, ranks, "finished", "preempted", limit=4096).items()
    }


def status_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """As `last_records`, but steps and phases only from the last 4 KiB; and how many lines are not records.

    Most of a long record are steps and phases, of which only the newest matter: reading all of them for hundreds of
    runs would take seconds.
    """
    lines = last_bytes(path, 1 << 20).split(b"\n")[:-1]
    position, status_lines = 0, []
    for line in reversed(lines):
        position += len(line) + 1
        if position <= 1 << 12 or not line.startswith(_MANY):
            status_lines.append(line)
    records = [_record(line) for line in reversed(status_lines)]
    return [record for record in records if record is not None], records.count(None)


def last_bytes(path: Path, limit: int) -> bytes:
    """The last `limit` bytes of a file, from the start of a line on; empty if there is no such file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return b""
    return data if size <= limit else data.partition(b"\n")[2]


def _record(line: bytes) -> dict[str, Any] | None:
    return parse(line, EVENTS)
