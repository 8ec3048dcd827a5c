"""What a run's graphs keep of weights: PyTorch's names, and what the run started from.

Written by `assembly`. The table is read by the export of weights and has the values of entries that no tensor of the
run has; the record is read by the next attempt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortflow.workflow.weights.file import encoded, read_file
from ortflow.workflow.weights.table import Array, Entry, from_json, to_json

FILE = "state_dict.safetensors"
"""In the folder of a run's graphs; absent if the model file has no table."""
TABLE = "table"
"""Key of the file's metadata."""
RECORD = "start_from.json"
"""In the folder of a run's graphs, if `model.start_from` is given."""


@dataclass(frozen=True)
class Record:
    """What a run started from."""

    section: dict[str, Any]
    """`model.start_from`."""
    digest: str
    """Hash of the files."""
    files: tuple[tuple[str, int, int], ...]
    """Path, size and time of change, in nanoseconds, of each."""

    def encode(self) -> bytes:
        """The content of `RECORD`."""
        return (json.dumps(vars(self), indent=1) + "\n").encode()

    @property
    def is_current(self) -> bool:
        """Whether the files that still exist are unchanged."""
        return all(stamp(Path(path)) in (None, (path, size, time)) for path, size, time in self.files)


def stamp(path: Path) -> tuple[str, int, int] | None:
    """A file's path, size and time of change; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_size, status.st_mtime_ns


def read_record(folder: Path) -> Record | None:
    """The record in a folder of graphs; None if it has none that can be read."""
    try:
        row = json.loads((folder / RECORD).read_bytes())
        files = tuple((str(path), int(size), int(time)) for path, size, time in row["files"])
        return Record(dict(row["section"]), str(row["digest"]), files)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def kept_file(entries: Sequence[Entry]) -> bytes:
    """The content of `FILE`."""
    plain = [replace(entry, value=None) for entry in entries]
    values: Iterable[tuple[str, str, Array]] = (
        (entry.name, entry.dtype, entry.value) for entry in entries if entry.value is not None
    )
    return encoded(values, {TABLE: to_json(plain)})


def read_kept(folder: Path) -> list[Entry] | None:
    """The table in a folder of graphs; None if it has none. Raises UserError if it is damaged."""
    try:
        contents = read_file(folder / FILE)
    except FileNotFoundError:
        return None
    stored = contents.tensors
    return [
        replace(entry, value=stored[entry.name].read()) if entry.name in stored else entry
        for entry in from_json(contents.metadata.get(TABLE, "[]"))
    ]
