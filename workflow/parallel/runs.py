"""Runs of elements that two flat buffers have in common, and copies along them. Pure.

A region of a tensor is not contiguous in the flat buffer of the whole model. A run is a piece that is contiguous in
both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.parallel.region import Region

Places = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]
LONG = 256
"""Average length of a run in elements, above which copying run by run is faster than indexing every element."""


@dataclass(frozen=True)
class Runs:
    """Run i: `length[i]` elements from `whole[i]` on in one buffer, and from `local[i]` on in the other."""

    whole: Places
    local: Places
    length: Places

    @property
    def count(self) -> int:
        """Total number of elements."""
        return int(self.length.sum())

    def moved(self, offset: int, local_offset: int) -> Runs:
        """The same runs, shifted by a number of elements in each of the two buffers."""
        return Runs(self.whole + offset, self.local + local_offset, self.length)

    def within_whole(self, start: int, stop: int) -> Runs:
        """The runs within elements [start, stop) of the first buffer."""
        first, last = np.maximum(self.whole, start), np.minimum(self.whole + self.length, stop)
        return self._cut(first - self.whole, last - first)

    def within_local(self, start: int, stop: int) -> Runs:
        """The runs within elements [start, stop) of the second buffer."""
        first, last = np.maximum(self.local, start), np.minimum(self.local + self.length, stop)
        return self._cut(first - self.local, last - first)

    def _cut(self, skipped: Places, length: Places) -> Runs:
        nonempty = length > 0
        return Runs((self.whole + skipped)[nonempty], (self.local + skipped)[nonempty], length[nonempty])

    def pieces(self, size: int) -> Iterator[Runs]:
        """The same elements in the same order, in groups of at most `size`."""
        ends = np.cumsum(self.length)
        starts = ends - self.length
        for first in range(0, self.count, size):
            last = first + size
            rows = slice(np.searchsorted(ends, first, "right"), np.searchsorted(starts, last, "left"))
            skipped = np.maximum(first - starts[rows], 0)
            length = np.minimum(ends[rows], last) - starts[rows] - skipped
            yield Runs(self.whole[rows] + skipped, self.local[rows] + skipped, length)


NOTHING = Runs(*(np.empty(0, np.int64) for _ in range(3)))


def joined(parts: Iterable[Runs]) -> Runs:
    """All runs, sorted by their places in the first buffer."""
    parts = list(parts)
    if not parts:
        return NOTHING
    starts, local_starts, lengths = (
        np.concatenate(arrays) for arrays in zip(*((p.whole, p.local, p.length) for p in parts), strict=True)
    )
    order = np.argsort(starts, kind="stable")
    return Runs(starts[order], local_starts[order], lengths[order])


def runs_of(shape: tuple[int, ...], region: Region) -> Runs:
    """The runs of a region of a tensor of `shape`, with the region stored as a tensor; both start at element 0."""
    if region.axis is None:
        count = math.prod(shape)
        return Runs(*(np.array([number], np.int64) for number in (0, 0, count))) if count else NOTHING
    outer, inner = math.prod(shape[: region.axis]), math.prod(shape[region.axis + 1 :])
    rows = np.arange(outer, dtype=np.int64)
    along = region.shape(shape)[region.axis]
    parts, passed = [], 0
    for start, stop in region.ranges:
        length = (stop - start) * inner
        if length:
            starts, local_starts = (rows * shape[region.axis] + start) * inner, (rows * along + passed) * inner
            parts.append(Runs(starts, local_starts, np.full(outer, length, np.int64)))
        passed += stop - start
    return joined(parts)


def take(array: Array, starts: Places, lengths: Places) -> Array:
    """The elements of runs, concatenated, as a copy."""
    if lengths.sum() >= LONG * len(lengths):
        pieces = [
            array[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.concatenate(pieces) if pieces else array[:0].copy()
    return array[_every(starts, lengths)]


def put(array: Array, starts: Places, lengths: Places, values: Array) -> None:
    """Write concatenated values into the elements of runs."""
    if lengths.sum() >= LONG * len(lengths):
        place = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            array[start : start + length] = values[place : place + length]
            place += length
    else:
        array[_every(starts, lengths)] = values


def _every(starts: Places, lengths: Places) -> Places:
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(lengths.sum())
