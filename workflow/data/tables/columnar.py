"""Parquet, Feather and Arrow files, and folders of Hugging Face datasets, as rows by number.

Their rows lie in compressed groups, so that one row costs its whole group. They are decoded once into an Arrow file in
the cache, which ranks map into memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ortflow.workflow.data.samples import Indices
from ortflow.workflow.data.tables.files import ARROW, PARQUET
from ortflow.workflow.data.tables.store import entry, key_of
from ortflow.workflow.data.tables.summary import KINDS, Summary, kind_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph_hashes import hash_of

_ROWS = 1 << 16
"""Rows decoded at a time."""
_BATCH_BYTES = 256 << 20
"""Size of a record batch of the decoded file."""
_QUIET = 2.0


class ColumnarTable:
    """The rows of one or several files, decoded."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Decode the files, or take what an earlier run decoded. Raises UserError, naming the file."""
        self.files = tuple(files)
        try:
            folder, record = entry(key_of(files, "decoded"), lambda folder: _decode(files, folder))
        except OSError as error:
            where = str(error.filename or files[0])
            raise UserError(f"cannot be read ({error.strerror or error})", where=where) from None
        self.summaries = {name: Summary.from_json(values) for name, values in record["columns"].items()}
        self.file_rows: list[int] = record["file_rows"]
        self.bad, self.bad_rows = 0, list[str]()
        self.digest: str = record["digest"]
        with pa.memory_map(str(folder / "table.arrow")) as mapped:
            reader = pa.ipc.open_file(mapped)
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._schema = reader.schema
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    @property
    def format(self) -> str:
        """The format's name."""
        return {".parquet": "Parquet", ".pq": "Parquet", ".feather": "Feather"}.get(self.files[0].suffix, "Arrow")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: Indices, names: Sequence[str]) -> pa.Table:
        """Some columns of some rows, in their order."""
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        parts = []
        for owner in np.unique(owners).tolist():
            rows = indices[owners == owner] - self._starts[owner]
            parts.append(self._batches[owner].select(list(names)).take(pa.array(rows)))
        if len(parts) == 1:
            return pa.Table.from_batches(parts)
        order = np.argsort(owners, kind="stable")
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        schema = pa.schema([self._schema.field(name) for name in names])
        return pa.Table.from_batches(parts, schema).combine_chunks().take(pa.array(back))

    def parts(self, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Some columns of all rows in order, in parts with the number of their first row."""
        for first, batch in zip(self._starts.tolist(), self._batches, strict=False):
            for start in range(0, batch.num_rows, _ROWS):
                yield first + start, pa.Table.from_batches([batch.select(list(names)).slice(start, _ROWS)])

    def name_of(self, row: int) -> str:
        """Where a row is: its file and its number there, from 0."""
        firsts = np.cumsum([0, *self.file_rows])
        number = int(np.searchsorted(firsts, row, side="right")) - 1
        return f"{self.files[number]}, row {row - int(firsts[number])}"


def _decode(files: Sequence[Path], folder: Path) -> dict[str, Any]:
    summaries: dict[str, Summary] = {}
    file_rows, hashing = [], xxhash.xxh3_128()
    schema: pa.Schema | None = None
    writer: pa.RecordBatchFileWriter | None = None
    waiting: list[pa.RecordBatch] = []
    began = noted = time.monotonic()
    for number, path in enumerate(files):
        rows = 0
        for batch in _batches(path):
            own = pa.schema([(field.name, KINDS[kind_of(field.type)]) for field in batch.schema if _is_readable(field)])
            if schema is None:
                schema = own
                writer = pa.ipc.new_file(str(folder / "table.arrow"), schema)
                summaries = {field.name: Summary() for field in batch.schema}
            elif own != schema:
                raise UserError(
                    f"has the columns {_described(own)}, but {files[0].name} has {_described(schema)}",
                    where=str(path),
                    fix="give files of one table",
                )
            decoded = _canonical(batch, schema, path, rows)
            for name, summary in summaries.items():
                source = decoded if name in schema.names else batch
                summary.add(pa.chunked_array([source.column(name)]))
            rows += batch.num_rows
            waiting.append(decoded)
            if sum(each.nbytes for each in waiting) > _BATCH_BYTES:
                waiting = _written(writer, waiting)
            if time.monotonic() - noted > _QUIET:
                noted = time.monotonic()
                print(f"decoding {path.name} ({number + 1} of {len(files)} files): {rows:,} rows", file=sys.stderr)
        file_rows.append(rows)
        hashing.update(hash_of(path).encode())
    if writer is None or schema is None:
        raise UserError("holds no row", where=str(files[0]), fix="give a table with rows")
    _written(writer, waiting)
    writer.close()
    if time.monotonic() - began > _QUIET:
        print(f"decoded {sum(file_rows):,} rows in {time.monotonic() - began:.0f} s", file=sys.stderr)
    columns = {name: summary.to_json() for name, summary in summaries.items()}
    return {"columns": columns, "file_rows": file_rows, "digest": hashing.hexdigest()}


def _is_readable(field: pa.Field) -> bool:
    return kind_of(field.type) in KINDS


def _written(writer: pa.RecordBatchFileWriter | None, waiting: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Write what waits as one record batch."""
    if waiting and writer is not None:
        for batch in pa.Table.from_batches(waiting).combine_chunks().to_batches():
            writer.write_batch(batch)
    return []


def _canonical(batch: pa.RecordBatch, schema: pa.Schema, path: Path, first: int) -> pa.RecordBatch:
    """The columns that can be read, each as its kind's type."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        # Decimals and nanoseconds are rounded; whole numbers must fit.
        whole = kind_of(column.type) in ("integer", "integers")
        try:
            columns.append(column.cast(field.type, safe=whole))
        except pa.ArrowInvalid as error:
            reason = str(error).partition("\n")[0]
            where = f"{path}, rows {first} to {first + batch.num_rows - 1}"
            raise UserError(f"column {field.name!r} cannot be read ({reason})", where=where) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix.lower() in PARQUET:
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_ROWS)
        elif path.suffix.lower() in ARROW:
            with pa.memory_map(str(path)) as mapped:
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
