"""A set of samples: memory-mapped Arrow IPC files that can be read in any order.

Opened by the shard step on every rank, by the checks and by `ortflow data show`. Holds views of the mapped files, never
a copy: the data is in the system's page cache, shared by the ranks of a machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ortflow.workflow.data.schema import (
    VERSION,
    VERSION_KEY,
    Array,
    Column,
    Ragged,
    Range,
    UnusableError,
    column_of,
    decode_ranges,
    join_ranges,
    view,
)
from ortflow.workflow.data.source_formats import way_to_a_set
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

Indices = npt.NDArray[np.int64]

_MAGIC = b"ARROW1"
_ROW_BY_ROW_BYTES = 4096
"""Samples of at least this many bytes in several record batches are copied one by one: once instead of twice."""


@dataclass(frozen=True)
class _Shard:
    """One file: its columns, and for each record batch the number of samples, and a view and a range per column."""

    columns: dict[str, Column]
    counts: list[int]
    views: list[dict[str, Array | Ragged]]
    ranges: list[dict[str, Range]]


class Dataset:
    """All samples of one file, or of a folder of shards in the order of their names."""

    def __init__(self, path: Path, columns: dict[str, Column], shards: list[_Shard]) -> None:
        self.path = path
        self.columns = columns
        self.shard_counts = [sum(shard.counts) for shard in shards]
        batches = [views for shard in shards for views in shard.views]
        self._fixed: dict[str, list[Array]] = {name: [] for name in columns}
        self._ragged: dict[str, list[Ragged]] = {name: [] for name in columns}
        for name, samples in (item for batch in batches for item in batch.items()):
            if isinstance(samples, Ragged):
                self._ragged[name].append(samples)
            else:
                self._fixed[name].append(samples)
        self._starts = np.cumsum([0, *(count for shard in shards for count in shard.counts)], dtype=np.int64)

    @classmethod
    def open(cls, path: str | Path, places: Sequence[Path] = ()) -> Dataset:
        """Map a file or a folder of shards, or several of them, which `path` names in messages.

        Raises
        ------
        UserError
            Naming the file, if it does not exist, is not an Arrow IPC file, is truncated or compressed, has no samples,
            missing values or columns that are not numbers, or if shards differ in their columns.
        """
        path = Path(path)
        files = [file for place in places or [path] for file in _shard_files(place)]
        shards = [_open_shard(file) for file in files]
        first = shards[0].columns
        for file, shard in zip(files, shards, strict=True):
            if shard.columns.keys() != first.keys() or any(not shard.columns[name].like(first[name]) for name in first):
                raise UserError(
                    f"has the columns {_describe(shard.columns)}, but {files[0].name} has {_describe(first)}",
                    where=str(file),
                    fix="give shards of one set",
                )
        if not any(sum(shard.counts) for shard in shards):
            raise UserError("holds no sample", where=str(path), fix="convert the data again")
        ranges = [batch for shard in shards for batch in shard.ranges]
        columns = {
            name: column.with_range(join_ranges([batch[name] for batch in ranges]))
            if all(name in batch for batch in ranges)
            else column
            for name, column in first.items()
        }
        return cls(path, columns, shards)

    @property
    def has_ranges(self) -> bool:
        """Whether the shards record the minimum and maximum of every column."""
        return all(column.minimum is not None for column in self.columns.values())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, name: str, indices: Indices) -> Array:
        """Copy samples of a fixed-size column.

        Parameters
        ----------
        name
            The column.
        indices
            Numbers of samples, each in [0, len(self)).

        Returns
        -------
        array
            [len(indices), *shape].
        """
        views = self._fixed[name]
        if len(views) == 1:
            # A third of the time of `views[0][indices]` (numpy 2.4, 256 rows of 256 bytes).
            return views[0].take(indices, axis=0)
        batches, rows = self._locate(indices)
        column = self.columns[name]
        out = np.empty((len(indices), *column.shape), column.dtype)
        if out.nbytes >= _ROW_BY_ROW_BYTES * len(indices):
            for place, (batch, row) in enumerate(zip(batches.tolist(), rows.tolist(), strict=True)):
                out[place] = views[batch][row]
            return out
        for batch in np.unique(batches).tolist():
            places = np.flatnonzero(batches == batch)
            out[places] = views[batch][rows[places]]
        return out

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a variable-length column, one array each, without a copy."""
        views = self._ragged[name]
        batches, rows = self._locate(indices)
        return [views[batch][row] for batch, row in zip(batches.tolist(), rows.tolist(), strict=True)]

    def lengths(self, name: str) -> Indices:
        """Number of elements of every sample of a variable-length column, [len(self)].

        Raises UserError if a sample ends before it begins: Arrow checks only the first and the last offset.
        """
        lengths = np.concatenate([ragged.lengths for ragged in self._ragged[name]])
        if (negative := np.flatnonzero(lengths < 0)).size:
            raise UserError(
                f"is damaged: sample {negative[0]} of column {name!r} ends before it begins",
                where=str(self.path), fix="convert the data again",
            )  # fmt: skip
        return lengths

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """The record batches of a column in order, each with the number of its first sample."""
        views: Sequence[Array | Ragged] = self._fixed[name] or self._ragged[name]
        return zip(self._starts[:-1].tolist(), views, strict=True)

    def _locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Record batch and row of each sample."""
        batches = np.searchsorted(self._starts, indices, side="right") - 1
        return batches, indices - self._starts[batches]


def _shard_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError("no such file or folder", where=str(path), fix="create it with `ortflow data convert`")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.glob("*.arrow") if not file.name.startswith("."))
    if not files:
        raise UserError("holds no .arrow file", where=str(path), fix="create shards with `ortflow data convert`")
    return files


def _open_shard(file: Path) -> _Shard:
    try:
        # pyarrow takes paths as UTF-8, and its UnicodeEncodeError, a ValueError, would be taken for damage below.
        str(file).encode()
    except UnicodeEncodeError:
        raise UserError("has a name that is not UTF-8", where=str(file), fix="rename it") from None
    try:
        with os.fdopen(open_regular(file), "rb") as head:
            if head.read(len(_MAGIC)) != _MAGIC:
                raise UserError("is not an Arrow IPC file", where=str(file), fix=way_to_a_set(file))
        return _map_shard(file)
    except UnusableError as reason:
        raise UserError(str(reason), where=str(file), fix="convert the data again") from None
    except (pa.ArrowException, OSError, ValueError) as reason:
        if isinstance(reason, OSError) and reason.strerror and reason.filename:
            raise UserError(reason.strerror, where=str(file), fix="give an Arrow file") from None
        first_line = str(reason).partition("\n")[0]
        raise UserError(
            f"cannot be read, it is truncated or damaged ({first_line})", where=str(file), fix="convert it again"
        ) from None


def _map_shard(file: Path) -> _Shard:
    # Buffers of the file keep it mapped after it is closed.
    with pa.memory_map(str(file)) as mapped:
        file_buffer = mapped.read_buffer()
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped)
        _check_version(reader.schema)
        columns = {field.name: column_of(field) for field in reader.schema}
        if len(columns) < len(reader.schema):
            raise UnusableError("two columns have the same name")
        shard = _Shard(columns, [], [], [])
        for number in range(reader.num_record_batches):
            batch, metadata = reader.get_batch_with_custom_metadata(number)
            if batch.num_rows == 0:
                continue
            batch.validate()
            shard.counts.append(batch.num_rows)
            shard.views.append({name: view(batch.column(name), name, columns[name]) for name in columns})
            shard.ranges.append(decode_ranges(metadata))
    if not all(_lies_in(views, file_buffer) for views in shard.views):
        raise UnusableError("is compressed, and cannot be read in random order")
    return shard


def _check_version(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(VERSION_KEY, b"1").decode(errors="backslashreplace")
    if version != str(VERSION):
        raise UnusableError(f"is of version {version} of the format, this ortflow supports version {VERSION}")


def _lies_in(views: dict[str, Array | Ragged], mapped: pa.Buffer) -> bool:
    """Whether the views refer to the mapped file, not to memory that was filled from it."""
    arrays = [samples.values if isinstance(samples, Ragged) else samples for samples in views.values()]
    return all(mapped.address <= array.ctypes.data <= mapped.address + mapped.size for array in arrays if array.size)


def _describe(columns: dict[str, Column]) -> str:
    return ", ".join(f"{name} ({column})" for name, column in columns.items()) or "none"
