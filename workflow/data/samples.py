"""What the loop, the checks and the commands need of a set of samples, whatever it is stored as.

`Dataset` (mapped Arrow files) is one implementation; `ortflow.workflow.data.sources` opens others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.schema import Array, Column, Ragged

Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """Samples by number, in columns of numbers."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        ...

    @property
    def columns(self) -> dict[str, Column]:
        """Each column's element type and shape of a sample."""
        ...

    @property
    def shard_counts(self) -> Sequence[int]:
        """Number of samples of each file."""
        ...

    @property
    def has_ranges(self) -> bool:
        """Whether the minimum and maximum of every column are known without reading the samples."""
        ...

    def __len__(self) -> int: ...

    def read(self, name: str, indices: Indices) -> Array:
        """Samples of a fixed-size column, [len(indices), *shape]."""
        ...

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a variable-length column, one array each."""
        ...

    def lengths(self, name: str) -> Indices:
        """Number of elements of every sample of a variable-length column, [len(self)]."""
        ...

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """A column in order, in parts, each with the number of its first sample."""
        ...


@runtime_checkable
class Identified(Protocol):
    """Samples that know a hash of their content, such as of the names and sizes of files."""

    @property
    def digest(self) -> str:
        """The hash, as hexadecimal digits."""
        ...


@runtime_checkable
class Classified(Protocol):
    """Samples whose labels are numbers of named classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class; empty if the labels have no names."""
        ...

    def with_classes(self, classes: tuple[str, ...], where: str) -> Samples:
        """The samples with the numbers of another table. Raises UserError at `where` for a class that it lacks."""
        ...


@runtime_checkable
class Epochs(Protocol):
    """Samples that differ between epochs, as those with transforms do; `read` gives those of epoch 0."""

    def at(self, epoch: int) -> Samples:
        """The samples of an epoch."""
        ...
