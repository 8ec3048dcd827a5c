"""Some samples of a set, as a set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from ortflow.workflow.data.samples import Identified, Indices, Reading, Samples, fault_of, reading_of
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.errors import UserError


class Selected:
    """The samples `rows` of another set, in ascending order. Ranges of columns are those of the other set."""

    def __init__(self, samples: Samples, rows: Indices) -> None:
        self.samples, self.rows = samples, rows
        self._last: tuple[Indices | None, Indices] = (None, rows)

    @property
    def path(self) -> Path:
        """The file or folder of the whole set."""
        return self.samples.path

    @property
    def columns(self) -> dict[str, Column]:
        """Each column's element type and shape of a sample."""
        return self.samples.columns

    @property
    def shard_counts(self) -> Sequence[int]:
        """One part."""
        return [len(self.rows)]

    @property
    def has_ranges(self) -> bool:
        """Whether the ranges of the whole set are known."""
        return self.samples.has_ranges

    def __len__(self) -> int:
        return len(self.rows)

    def fault_of(self, name: str) -> UserError | None:
        """Why a column cannot fill an input; None if it can."""
        return fault_of(self.samples, name)

    @property
    def reading(self) -> Reading:
        """How the samples of the whole set are made."""
        return reading_of(self.samples)

    def read(self, name: str, indices: Indices) -> Array:
        """Samples of a fixed-size column, [len(indices), *shape]."""
        return self.samples.read(name, self._rows(indices))

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a variable-length column, one array each."""
        return self.samples.read_ragged(name, self._rows(indices))

    def lengths(self, name: str) -> Indices:
        """Number of elements of every sample of a variable-length column, [len(self)]."""
        return self.samples.lengths(name)[self.rows]

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """A column in order, in parts, each with the number of its first sample."""
        for first, part in self.samples.scan(name):
            start, stop = np.searchsorted(self.rows, [first, first + len(part)])
            if start == stop:
                continue
            part_rows = self.rows[start:stop] - first
            if isinstance(part, Ragged):
                yield int(start), Ragged.of([part[row] for row in part_rows.tolist()], part.values.dtype)
            else:
                yield int(start), part[part_rows]

    def _rows(self, indices: Indices) -> Indices:
        """The same array for the same indices: a set may read the columns of a batch together."""
        last, rows = self._last
        if last is not indices:
            rows = self.rows[indices]
            self._last = (indices, rows)
        return rows


class IdentifiedSelected(Selected):
    """Some samples of a set that knows a hash of its content."""

    @property
    def digest(self) -> str:
        """Hash of the whole set and of which samples these are."""
        assert isinstance(self.samples, Identified)
        rows_hash = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.rows).data)
        return xxhash.xxh3_128_hexdigest(f"{self.samples.digest} {rows_hash}".encode())


def selected(samples: Samples, rows: Indices) -> Selected:
    """The samples `rows` of a set."""
    return (IdentifiedSelected if isinstance(samples, Identified) else Selected)(samples, rows)
