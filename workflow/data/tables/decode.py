"""The pass that decodes Parquet, Feather and Arrow files into uncompressed Arrow files, with a summary of each column.

It continues where an earlier pass was interrupted, with the same result. Called by `columnar`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ortflow.workflow.data.tables.files import ARROW, PARQUET
from ortflow.workflow.data.tables.store import forget, save, saved
from ortflow.workflow.data.tables.summary import KINDS, Summary, kind_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of

_ROWS = 1 << 16
"""Rows decoded at a time."""
_PART_BYTES = 256 << 20
"""Decoded bytes of a file, which is one record batch."""
_QUIET = 2.0


@dataclass
class _State:
    """What has been decoded and written."""

    kinds: dict[str, str] | None = None
    """Kind of each column that can be read; None before the first row."""
    summaries: dict[str, Summary] = field(default_factory=dict)
    file_rows: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """Of the files of `file_rows`."""
    rows: int = 0
    """Rows of the next file."""
    parts: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        columns = {name: summary.to_json() for name, summary in self.summaries.items()}
        return {**self.__dict__, "summaries": columns}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> _State:
        """The inverse of `to_json`."""
        summaries = {name: Summary.from_json(summary) for name, summary in values["summaries"].items()}
        return cls(**{**values, "summaries": summaries})


def part_of(folder: Path, number: int) -> Path:
    """One of the decoded files."""
    return folder / f"{number:05}.arrow"


def decode(files: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Decode the files into a folder, and return the record of the result. Raises UserError, naming the file."""
    state = _continued(folder)
    waiting: list[pa.RecordBatch] = []
    began = noted = time.monotonic()
    for number, path in enumerate(files):
        if number < len(state.file_rows):
            continue
        decoded_rows, rows = state.rows, 0
        for batch in _batches(path):
            rows += batch.num_rows
            if rows <= decoded_rows:
                continue
            waiting.append(_added(state, batch, path, files[0]))
            if sum(piece.nbytes for piece in waiting) > _PART_BYTES:
                _write(state, waiting, folder)
                waiting = []
                save(folder, state.to_json())
            if time.monotonic() - noted > _QUIET:
                noted = time.monotonic()
                line = f"decoding {path.name} ({number + 1} of {len(files)} files): {rows:,} rows"
                print(line, file=sys.stderr, flush=True)
        state.file_rows.append(state.rows)
        state.hashes.append(hash_of(path))
        state.rows = 0
    if state.kinds is None:
        raise UserError("holds no row", where=str(files[0]), fix="give a table with rows")
    _write(state, waiting, folder)
    forget(folder)
    if time.monotonic() - began > _QUIET:
        print(f"decoded {sum(state.file_rows):,} rows in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    columns = {name: summary.to_json() for name, summary in state.summaries.items()}
    digest = xxhash.xxh3_128_hexdigest("".join(state.hashes).encode())
    return {"columns": columns, "file_rows": state.file_rows, "digest": digest, "parts": state.parts}


def _continued(folder: Path) -> _State:
    """What an interrupted pass has written; files behind that are removed."""
    state = _State()
    if (values := saved(folder)) is not None:
        try:
            state = _State.from_json(values)
        except (KeyError, TypeError, AttributeError):
            state = _State()
    if not all(part_of(folder, number).is_file() for number in range(state.parts)):
        state = _State()
    for file in folder.glob("*.arrow"):
        if file not in [part_of(folder, number) for number in range(state.parts)]:
            file.unlink()
    if state.parts:
        done = sum(state.file_rows) + state.rows
        print(f"decoding continues behind {done:,} rows", file=sys.stderr, flush=True)
    return state


def _added(state: _State, batch: pa.RecordBatch, path: Path, first: Path) -> pa.RecordBatch:
    """The rows as they are stored, added to the summaries."""
    kinds = {field.name: kind_of(field.type) for field in batch.schema if _is_readable(field)}
    if state.kinds is None:
        state.kinds = kinds
        state.summaries = {field.name: Summary() for field in batch.schema}
    elif list(kinds.items()) != list(state.kinds.items()):
        raise UserError(
            f"has the columns {_described(kinds)}, but {first.name} has {_described(state.kinds)}",
            where=str(path),
            fix="give files of one table",
        )
    schema = pa.schema([(name, KINDS[kind]) for name, kind in state.kinds.items()])
    decoded = _canonical(batch, schema, path, state.rows)
    for name, summary in state.summaries.items():
        source = decoded if name in schema.names else batch
        summary.add(pa.chunked_array([source.column(name)]))
    state.rows += batch.num_rows
    return decoded


def _write(state: _State, waiting: Sequence[pa.RecordBatch], folder: Path) -> None:
    """Write what waits as one file, which is on the disk when this returns."""
    if not waiting:
        return
    path = part_of(folder, state.parts)
    with path.open("wb") as file:
        with pa.ipc.new_file(file, waiting[0].schema) as writer:
            # More than one where a column has 2 GiB of text: its offsets have 32 bits.
            for batch in pa.Table.from_batches(waiting).combine_chunks().to_batches():
                writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    state.parts += 1


def _is_readable(field: pa.Field) -> bool:
    return kind_of(field.type) in KINDS


def _canonical(batch: pa.RecordBatch, schema: pa.Schema, path: Path, first: int) -> pa.RecordBatch:
    """The columns that can be read, each as its kind's type."""
    columns = []
    for target in schema:
        column = batch.column(target.name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        # Decimals and nanoseconds are rounded; whole numbers must fit.
        is_whole = kind_of(column.type) in ("integer", "integers")
        try:
            columns.append(column.cast(target.type, safe=is_whole))
        except pa.ArrowInvalid as error:
            reason = str(error).partition("\n")[0]
            location = f"{path}, rows {first} to {first + batch.num_rows - 1}"
            raise UserError(f"column {target.name!r} cannot be read ({reason})", where=location) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _described(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name} ({KINDS[kind]})" for name, kind in kinds.items())


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix.lower() in PARQUET:
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_ROWS)
        elif path.suffix.lower() in ARROW:
            with pa.memory_map(str(path)) as mapped:
                # Feather is Arrow's file format, with this mark; the datasets of Hugging Face are in the stream format.
                if mapped.read(6) == b"ARROW1":
                    reader = pa.ipc.open_file(mapped)
                    for number in range(reader.num_record_batches):
                        yield reader.get_batch(number)
                else:
                    mapped.seek(0)
                    yield from pa.ipc.open_stream(mapped)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot be read, it is truncated or damaged ({reason})", where=str(path)) from None
