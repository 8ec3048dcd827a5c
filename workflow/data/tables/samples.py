"""A table as a set of samples: its columns and stacked inputs as numbers, row by row in any order."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyarrow import csv

from ortflow.workflow.data.samples import Indices, Reading
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.data.tables.fields import Source, missing_value, recorded, unusable
from ortflow.workflow.data.tables.summary import DATED, Summary
from ortflow.workflow.errors import UserError


class Table(Protocol):
    """Rows by number, with a summary of each column."""

    files: tuple[Path, ...]
    summaries: dict[str, Summary]
    file_rows: list[int]
    bad: int
    """Rows that do not fit, which are not among those counted."""
    bad_rows: list[str]
    """The first of them, each as a sentence with file and line."""
    digest: str
    """Hash of the content."""

    @property
    def format(self) -> str:
        """The format's name."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: Indices, names: Sequence[str]) -> pa.Table:
        """Some columns of some rows, in their order."""
        ...

    def parts(self, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Some columns of all rows in order, in parts with the number of their first row."""
        ...

    def name_of(self, row: int) -> str:
        """Where a row is: its file and line."""
        ...


class TableSamples:
    """Implements `Samples` for a table and what was fitted on the training set."""

    def __init__(self, path: Path, table: Table, sources: Mapping[str, Source]) -> None:
        self.path, self.table = path, table
        self.sources = {
            name: source
            for name, source in sources.items()
            if all(part.column in table.summaries for part in source.parts)
        }
        self._stacked = {name: source for name, source in sources.items() if source.stacked}
        self.columns: dict[str, Column] = {
            name: source.column(table.summaries)
            for name, source in self.sources.items()
            if self._misfit(source) is None
        }
        self.shard_counts = table.file_rows
        self._wanted: tuple[str, ...] = ()
        self._last: tuple[Indices | None, pa.Table | None] = (None, None)
        self._lengths: dict[str, Indices] = {}

    @property
    def has_ranges(self) -> bool:
        """The index records the range of each column."""
        return True

    @property
    def reading(self) -> Reading:
        """Bad rows that are skipped, and what becomes of columns."""
        return Reading(self.table.bad, self.table.bad_rows, recorded(self.sources))

    @property
    def digest(self) -> str:
        """Hash of the files' content, and of what becomes of the columns."""
        recipe = json.dumps([self.table.digest, self.table.bad, len(self), recorded(self.sources)], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(recipe.encode())

    @property
    def classes(self) -> dict[str, list[str]]:
        """Column or input -> the names of its classes, by number."""
        return {
            name: list(source.parts[0].classes)
            for name, source in self.sources.items()
            if not source.stacked and source.parts[0].classes is not None
        }

    def __len__(self) -> int:
        return len(self.table)

    def fault_of(self, name: str) -> UserError | None:
        """Why a column cannot fill an input, with the first row that prevents it; None if it can."""
        source, summaries = self.sources.get(name), self.table.summaries
        if source is None and name in self._stacked:
            lacking = next(part.column for part in self._stacked[name].parts if part.column not in summaries)
            message = f"has no column {lacking!r}, which is a part of input {name!r}"
            return UserError(message, where=str(self.path), fix=f"add it: the columns are {', '.join(summaries)}")
        if source is None:
            return (
                UserError(f"column {name!r} {unusable(summaries[name])}", where=str(self.path))
                if name in summaries
                else None
            )
        for part in source.parts:
            summary = summaries[part.column]
            if (fault := self._misfit(source)) is not None:
                return fault
            if summary.missing and part.fill is None:
                row = summary.first_missing or 0
                suffix = f" ({summary.missing} rows have none)" if summary.missing > 1 else ""
                return missing_value(part.column, self.table.name_of(row) + suffix)
            if part.classes is not None and summary.classes is not None:
                unknown = summary.classes.keys() - set(part.classes)
                if unknown:
                    try:
                        for _ in self.scan(name):
                            pass
                    except UserError as error:
                        return error
        return None

    def _misfit(self, source: Source) -> UserError | None:
        """A column of another kind than in the training set."""
        for part in source.parts:
            kind = self.table.summaries[part.column].kind
            numeric = part.classes is None and part.unit is None
            if (numeric and kind in ("text", *DATED, "unsupported")) or (part.unit is not None and kind not in DATED):
                message = f"column {part.column!r} holds {kind}, and other values in the training set"
                first = self._first_word(part.column) if numeric and kind == "text" else None
                if first is None:
                    return UserError(message, where=str(self.path), fix="correct it")
                row, word = first
                message = f"has {word!r} as {part.column!r}, which holds numbers in the training set"
                return UserError(message, where=self.table.name_of(row), fix="correct it")
        return None

    def _first_word(self, name: str) -> tuple[int, str] | None:
        """The first value of a column of text that is not a number, and its row."""
        for first, part in self.table.parts([name]):
            for place, text in enumerate(part.column(name).to_pylist()):
                if text is not None and text.strip() and not _is_number(text):
                    return first + place, text
        return None

    def read(self, name: str, indices: Indices) -> Array:
        """Samples of a fixed-size column, [len(indices), *shape]."""
        return self._made(name, self._rows(name, indices), lambda row: int(indices[row]))

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a variable-length column, one array each."""
        ragged = self._ragged(name, self._rows(name, indices), lambda row: int(indices[row]))
        return [ragged[row] for row in range(len(ragged))]

    def lengths(self, name: str) -> Indices:
        """Number of elements of every sample of a variable-length column, [len(self)]."""
        if name not in self._lengths:
            parts = [part.lengths for _, part in self.scan(name) if isinstance(part, Ragged)]
            self._lengths[name] = np.concatenate([np.empty(0, np.int64), *parts])
        return self._lengths[name]

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """A column in order, in parts, each with the number of its first sample."""
        for first, rows in self.table.parts(self._needed(name)):
            if self.columns[name].variable:
                yield first, self._ragged(name, rows, partial(operator.add, first))
            else:
                yield first, self._made(name, rows, partial(operator.add, first))

    def _needed(self, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.column for part in self.sources[name].parts))

    def _rows(self, name: str, indices: Indices) -> pa.Table:
        """The rows of a batch, with all columns that batches need: they are read together for its inputs."""
        names = self._needed(name)
        last, table = self._last
        if last is indices and table is not None and set(names) <= set(table.column_names):
            return table
        self._wanted = tuple(dict.fromkeys([*self._wanted, *names]))
        table = self.table.take(indices, self._wanted)
        self._last = (indices, table)
        return table

    def _made(self, name: str, rows: pa.Table, number: Callable[[int], int]) -> Array:
        dtype = self.columns[name].dtype
        return self.sources[name].array(rows, dtype, lambda row: self.table.name_of(number(row)))

    def _ragged(self, name: str, rows: pa.Table, number: Callable[[int], int]) -> Ragged:
        part, column = self.sources[name].parts[0], rows.column(self.sources[name].parts[0].column)
        if column.null_count:
            raise missing_value(part.column, self.table.name_of(number(pc.index(column.is_null(), True).as_py())))
        array = column.combine_chunks()
        array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
        # Unlike `values`, which also has the elements before and behind a slice.
        values = array.flatten()
        offsets = np.concatenate([[0], np.cumsum(np.asarray(array.value_lengths(), np.int64))])
        if values.null_count:
            place = pc.index(values.is_null(), True).as_py()
            row = int(np.searchsorted(offsets, place, side="right")) - 1
            message = f"has a missing value inside the list {part.column!r}"
            raise UserError(message, where=self.table.name_of(number(row)), fix="complete it, or remove the row")
        return Ragged(values.cast(pa.from_numpy_dtype(self.columns[name].dtype)).to_numpy(), offsets)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip() in csv.ConvertOptions().null_values
    return True
