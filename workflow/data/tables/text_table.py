"""CSV and JSON lines as rows by number: an index of where each record is, and the records read when they are needed."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ortflow.workflow.data.samples import Indices
from ortflow.workflow.data.tables.files import JSON_LINES
from ortflow.workflow.data.tables.parse import Dialect, parse
from ortflow.workflow.data.tables.scan import Scan, scan, text_kinds
from ortflow.workflow.data.tables.store import check_unchanged, entry, forget, key_of, save, saved
from ortflow.workflow.data.tables.summary import Summary
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

_SCAN_BYTES = 4 << 20


class TextTable:
    """The rows of one or several files; bad ones are not among them."""

    def __init__(self, files: Sequence[Path], types: Mapping[str, str]) -> None:
        """Index the files, or take the index of an earlier run. Raises UserError, naming the file."""
        self.files = tuple(files)
        is_json = files[0].suffix.lower() in JSON_LINES
        options = sorted(types.items())
        try:
            key = key_of(files, options)
            folder, record = entry(files, options, lambda folder: _build(files, is_json, types, folder))
            self._descriptors = [open_regular(file) for file in files]
            self._stamps = [_stamp(descriptor) for descriptor in self._descriptors]
            check_unchanged(files, options, key)
        except OSError as error:
            location = str(error.filename or files[0])
            raise UserError(f"cannot be read ({error.strerror or error})", where=location) from None
        self.dialect = Dialect(record["delimiter"], tuple(record["names"]))
        self.summaries = {name: Summary.from_json(values) for name, values in record["columns"].items()}
        self.file_rows: list[int] = record["file_rows"]
        self.bad, self.bad_rows = record["bad"], list(record["named"])
        self.digest: str = record["digest"]
        self._starts: npt.NDArray[np.int64] = _numbers(folder / "starts.bin", np.dtype("i8"))
        self._sizes: npt.NDArray[np.uint32] = _numbers(folder / "sizes.bin", np.dtype("u4"))
        self._firsts = np.cumsum([0, *self.file_rows])
        self._kinds = text_kinds(self.summaries)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def format(self) -> str:
        """The format's name."""
        if self.dialect.is_json:
            return "JSON lines"
        return {",": "CSV", "\t": "TSV"}.get(str(self.dialect.delimiter), f"CSV with {self.dialect.delimiter!r}")

    def take(self, indices: Indices, names: Sequence[str]) -> pa.Table:
        """Some columns of some rows, in their order. Raises UserError if a file has changed since it was indexed."""
        return self._parsed(self._records(indices), len(indices), names)

    def parts(self, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Some columns of all rows in order, in parts with the number of their first row."""
        size = max(1, len(self) * _SCAN_BYTES // max(1, int(self._sizes.sum(dtype=np.int64))))
        for first in range(0, len(self), size):
            rows = np.arange(first, min(first + size, len(self)))
            yield first, self.take(rows, names)

    def name_of(self, row: int) -> str:
        """Where a row is: its file and line."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        line, place, end = 1, 0, int(self._starts[row])
        while place < end and (part := os.pread(self._descriptors[number], min(1 << 24, end - place), place)):
            line, place = line + part.count(b"\n"), place + len(part)
        return f"{self.files[number]}, line {line}"

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", ()):
            os.close(descriptor)

    def _records(self, indices: Indices) -> bytes:
        starts, sizes = self._starts[indices], self._sizes[indices].astype(np.int64)
        if len(self.files) == 1:
            return self._read(0, starts, sizes)
        owners = np.searchsorted(self._firsts, indices, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        runs = [slice(cut, end) for cut, end in itertools.pairwise(cuts) if end > cut]
        return b"".join(self._read(int(owners[run.start]), starts[run], sizes[run]) for run in runs)

    def _read(self, number: int, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bytes:
        descriptor = self._descriptors[number]
        if _stamp(descriptor) != self._stamps[number]:
            raise self._changed(number)
        ends = starts + sizes
        # Neighbours are read with one call.
        cuts = np.flatnonzero(starts[1:] != ends[:-1])
        firsts, lasts = starts[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)]
        parts = []
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            part = os.pread(descriptor, last - first, first)
            if len(part) != last - first:
                part = self._whole(number, first, last, part)
            # Only the last record of a file may lack its line end.
            parts.append(part if part[-1] in b"\r\n" else part + b"\n")
        return b"".join(parts)

    def _whole(self, number: int, first: int, last: int, part: bytes) -> bytes:
        """The rest of a read: one call returns at most 2 GiB."""
        while len(part) < last - first:
            rest = os.pread(self._descriptors[number], last - first - len(part), first + len(part))
            if not rest:
                raise self._changed(number)
            part += rest
        return part

    def _parsed(self, records: bytes, count: int, names: Sequence[str]) -> pa.Table:
        kinds = {name: self._kinds[name] for name in names}
        try:
            table, faults = parse(records, self.dialect, kinds, names)
        except pa.ArrowInvalid as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"has changed since it was indexed ({reason})", where=str(self.files[0])) from None
        if faults or table.num_rows != count:
            raise self._changed(0)
        return table

    def _changed(self, number: int) -> UserError:
        return UserError(
            "has changed since it was indexed",
            where=str(self.files[number]),
            fix="restore the file, or start from the beginning with --fresh",
        )


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _numbers(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # mmap refuses a length of 0.
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _continued(folder: Path) -> Scan | None:
    """What a pass that was killed has saved; None if there is nothing."""
    values = saved(folder)
    try:
        return None if values is None else Scan.from_json(values)
    except (TypeError, KeyError, AttributeError):
        return None


def _build(files: Sequence[Path], is_json: bool, types: Mapping[str, str], folder: Path) -> dict[str, object]:
    before = _continued(folder)
    rows = 0 if before is None else before.rows
    with (folder / "starts.bin").open("ab") as starts, (folder / "sizes.bin").open("ab") as sizes:
        for file, size in ((starts, 8), (sizes, 4)):
            if os.fstat(file.fileno()).st_size < rows * size:  # the machine stopped, not only the process
                before, rows = None, 0
        for file, size in ((starts, 8), (sizes, 4)):
            file.truncate(rows * size)

        def append(places: npt.NDArray[np.int64], lengths: npt.NDArray[np.uint32]) -> None:
            starts.write(places.astype(np.int64, copy=False).data)
            sizes.write(lengths.data)

        def keep(result: Scan) -> None:
            for file in (starts, sizes):
                file.flush()
                os.fsync(file.fileno())
            save(folder, result.to_json())

        note = partial(print, file=sys.stderr, flush=True)
        index = scan(files, is_json, types, append, note, before=before, save=keep)
    forget(folder)
    return {
        "delimiter": index.dialect.delimiter,
        "names": list(index.dialect.names),
        "columns": {name: summary.to_json() for name, summary in index.columns.items()},
        "file_rows": index.file_rows,
        "bad": index.bad,
        "named": index.named,
        "digest": index.digest,
    }
