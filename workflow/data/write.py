"""Writes sets of samples: one file, or a folder of shards; atomically.

Called by the conversions and by programs that create data. Record batches are written as they come, so a set may be
larger than memory. It appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ortflow.workflow.data.schema import (
    VERSION,
    VERSION_KEY,
    Array,
    Ragged,
    column_of,
    encode_ranges,
    to_arrow,
    value_range,
    view,
)
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import sync_directory
from ortflow.workflow.system.disk_space import is_full, out_of_disk
from ortflow.workflow.system.files import open_regular
from ortflow.workflow.system.own_files import exchange, foreign_files, is_folder, remove

SET_FILES = re.compile(r"((train|eval)/)?shard-\d{5,}\.arrow|(train|eval)\.arrow")
"""File names in the folder of a set, or of a training and an evaluation set."""
BATCH_BYTES = 1 << 26
"""Target size of a record batch, which is the data in memory at a time."""


def record_batch(columns: Mapping[str, Array | Ragged]) -> pa.RecordBatch:
    """Combine samples of several columns, equal in number: arrays [n, ...] of numbers, or Ragged.

    Booleans become uint8. Raises UserError, naming the column, if counts differ or values are not numbers.
    """
    stored = {name: _storable(name, samples) for name, samples in columns.items()}
    if len({len(samples) for samples in stored.values()}) > 1:
        counts = ", ".join(f"{name} has {len(samples)}" for name, samples in stored.items())
        raise UserError(f"the columns differ in their number of samples: {counts}", fix="give them the same number")
    arrays = {name: to_arrow(samples) for name, samples in stored.items()}
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    schema = pa.schema(fields, metadata={VERSION_KEY: str(VERSION)})
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _storable(name: str, samples: Array | Ragged) -> Array | Ragged:
    if isinstance(samples, Ragged):
        return samples
    check_storable(name, samples.dtype, samples.shape)
    if samples.dtype.kind == "b":
        return samples.view(np.uint8)
    return samples.astype(samples.dtype.newbyteorder("="), copy=False)


def check_storable(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], location: str | None = None) -> None:
    """Raise UserError if an array is not a column: not numbers of up to 64 bits, no axis of samples, empty samples."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        kind = "objects" if dtype.hasobject else str(dtype)
        raise UserError(
            f"array {name!r} holds {kind}, neither integers nor floats of up to 64 bits",
            where=location,
            fix="save it as numbers",
        )
    if not shape or 0 in shape[1:]:
        content = f"samples of shape {list(shape[1:])}" if shape else "one number"
        raise UserError(f"array {name!r} holds {content}", where=location, fix="add a first axis for the samples")


def write_set(
    path: Path, batches: Iterable[pa.RecordBatch], *, shard_samples: int | None = None, replace: bool = False
) -> int:
    """Write a set of samples.

    Parameters
    ----------
    path
        File to write, or folder with `shard_samples`.
    batches
        Record batches.
    shard_samples
        Samples per file of the folder.
    replace
        Replace an existing set.

    Returns
    -------
    int
        Number of samples.

    Raises
    ------
    UserError
        If `path` exists and `replace` is not set, if it contains anything but a set, or if there are no samples.
        Nothing
        is left of an incomplete set, and existing files are unchanged.
    """
    with whole_or_nothing(path, replace=replace) as partial:
        if shard_samples is None:
            count = _write_file(partial, iter(batches))
        else:
            partial.mkdir()
            count = sum(
                _write_file(partial / f"shard-{number:05d}.arrow", shard)
                for number, shard in enumerate(_shards(iter(batches), shard_samples))
            )
            sync_directory(partial)
        if count == 0:
            raise UserError("there is no sample to write", where=str(path), fix="check the sources")
    return count


@contextmanager
def whole_or_nothing(path: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary path beside `path` for a file or folder; renamed to `path` at the end, removed on failure.

    Files at `path` are replaced if `replace` is set and all of them are sets that ortflow has written. They are moved
    aside until the new ones are in place, and restored on failure.
    """
    if os.path.lexists(path):
        _check_replaceable(path, replace)
    new_folders = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        _remove_empty(new_folders)
        raise _unwritable(path, error) from None
    try:
        (temporary / "new").mkdir()
        partial, old = temporary / "new" / path.name, temporary / "old"
        yield partial
        if os.path.lexists(path):
            _check_replaceable(path, replace)
        exchange(partial, path, old)
    except BaseException as error:
        shutil.rmtree(temporary / "new")
        temporary.rmdir()
        _remove_empty(new_folders)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise
    try:
        sync_directory(path.parent)
        if old.is_file():
            old.unlink()
        remove(old, SET_FILES)
        (temporary / "new").rmdir()
        temporary.rmdir()
    except OSError as error:
        raise UserError(
            f"is written, but the previous set cannot be removed ({error.strerror})",
            where=str(path),
            fix=f"remove {temporary}",
        ) from None


def _check_replaceable(path: Path, replace: bool) -> None:
    if not replace:
        raise UserError("exists already", where=str(path), fix="choose another output, or replace it with --force")
    foreign = _foreign_file(path)
    if foreign is not None:
        subject = f"holds {foreign}, which" if foreign else "exists and"
        raise UserError(
            f"{subject} is not a data set that ortflow has written, so --force does not replace it",
            where=str(path),
            fix="choose another output, or remove it",
        )


def _foreign_file(path: Path) -> str | None:
    """What in a path is not provably a set of ours: a name inside a folder, "" for the path itself; None if nothing."""
    if is_folder(path):
        foreign = next(foreign_files(path, SET_FILES), None)
        other_files = (file for file in sorted(path.rglob("*")) if file.is_file() and not _is_set_file(file))
        return foreign or next((file.relative_to(path).as_posix() for file in other_files), None)
    return None if path.is_file() and not path.is_symlink() and _is_set_file(path) else ""


def _is_set_file(path: Path) -> bool:
    """Whether the file's Arrow schema has the mark of our format."""
    try:
        # pyarrow opens the path by itself, and would wait for a pipe's writer.
        os.close(open_regular(path))
        with pa.memory_map(str(path)) as source:
            return VERSION_KEY in (pa.ipc.open_file(source).schema.metadata or {})
    except (OSError, pa.ArrowException):
        return False


def _unwritable(path: Path, error: OSError) -> OrtflowError:
    if is_full(error):
        return out_of_disk(error, default=path)
    return UserError(f"cannot be written ({error.strerror})", where=str(path), fix="choose another output")


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        if folder.exists():
            folder.rmdir()


def _shards(batches: Iterator[pa.RecordBatch], samples: int) -> Iterator[Iterator[pa.RecordBatch]]:
    """Divide a stream of batches into streams of `samples` samples; each must be consumed before the next."""
    rest: list[pa.RecordBatch] = []

    def shard() -> Iterator[pa.RecordBatch]:
        missing = samples
        while missing and rest:
            batch = rest.pop()
            part = batch.slice(0, missing)
            if part.num_rows < batch.num_rows:
                rest.append(batch.slice(missing))
            elif (following := next(batches, None)) is not None:
                rest.append(following)
            missing -= part.num_rows
            yield part

    rest.extend(batch for batch in [next(batches, None)] if batch is not None)
    while rest:
        yield shard()


def _write_file(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    first = next(batches, None)
    if first is None:
        return 0
    columns = {field.name: column_of(field) for field in first.schema}
    count = 0
    with path.open("wb") as file:
        with pa.ipc.new_file(file, first.schema) as writer:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                views = {name: view(batch.column(name), name, column) for name, column in columns.items()}
                spans = {name: value_range(samples) for name, samples in views.items()}
                ranges = {name: span for name, span in spans.items() if span is not None}
                writer.write_batch(batch, custom_metadata=encode_ranges(ranges))
                count += batch.num_rows
                batch = next(batches, None)
        file.flush()
        os.fsync(file.fileno())
    return count
