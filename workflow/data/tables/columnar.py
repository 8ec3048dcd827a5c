"""Parquet, Feather and Arrow files, and folders of Hugging Face datasets, as rows by number.

Their rows lie in compressed groups, so that one row costs its whole group. They are decoded once into Arrow files in
the cache, which ranks map into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ortflow.workflow.data.samples import Indices
from ortflow.workflow.data.tables.decode import decode, part_of
from ortflow.workflow.data.tables.store import entry
from ortflow.workflow.data.tables.summary import Summary
from ortflow.workflow.errors import UserError

_ROWS = 1 << 16
"""Rows read at a time."""


class ColumnarTable:
    """The rows of one or several files, decoded."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Decode the files, or take what an earlier run decoded. Raises UserError, naming the file."""
        self.files = tuple(files)
        try:
            folder, record = entry(files, "decoded", lambda folder: decode(files, folder))
        except OSError as error:
            location = str(error.filename or files[0])
            raise UserError(f"cannot be read ({error.strerror or error})", where=location) from None
        self.summaries = {name: Summary.from_json(values) for name, values in record["columns"].items()}
        self.file_rows: list[int] = record["file_rows"]
        self.bad, self.bad_rows = 0, list[str]()
        self.digest: str = record["digest"]
        self._batches = [batch for number in range(record["parts"]) for batch in _mapped(part_of(folder, number))]
        self._schema = self._batches[0].schema if self._batches else pa.schema([])
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


def _mapped(path: Path) -> list[pa.RecordBatch]:
    # Buffers of the file keep it mapped after it is closed.
    with pa.memory_map(str(path)) as mapped:
        reader = pa.ipc.open_file(mapped)
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
