"""Samples in numpy arrays that are mapped from files. Used by the formats whose files hold numbers as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ortflow.workflow.data.samples import FixedColumns, Indices
from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.errors import UserError


class MappedArrays(FixedColumns):
    """Fixed-size columns, in one or several parts: each part is {column: array [n, *shape]}.

    Arrays may be strided or unaligned views. Raises UserError if there is no sample.
    """

    has_ranges = False

    def __init__(self, path: Path, parts: Sequence[Mapping[str, Array]]) -> None:
        self.path = path
        self.columns = {name: Column(array.dtype, array.shape[1:]) for name, array in parts[0].items()}
        self.shard_counts = [len(next(iter(part.values()))) for part in parts]
        self._parts = parts
        self._starts = np.cumsum([0, *self.shard_counts], dtype=np.int64)
        if not len(self):
            raise UserError("holds no sample", where=str(path))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, name: str, indices: Indices) -> Array:
        """Copies of the samples, [len(indices), *shape]."""
        # Not `take`, which first copies the whole of an array that is strided or unaligned.
        if len(self._parts) == 1:
            samples: Array = self._parts[0][name][indices]
            return samples
        column = self.columns[name]
        samples = np.empty((len(indices), *column.shape), column.dtype)
        parts = np.searchsorted(self._starts, indices, side="right") - 1
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            samples[places] = self._parts[part][name][indices[places] - self._starts[part]]
        return samples

    def scan(self, name: str) -> Iterator[tuple[int, Array]]:
        """The parts in order, each with the number of its first sample."""
        return ((int(start), part[name]) for start, part in zip(self._starts[:-1], self._parts, strict=True))
