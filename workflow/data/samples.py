"""What the loop, the checks and the commands need of a set of samples, whatever it is stored as.

`Dataset` (mapped Arrow files) is one implementation; `ortflow.workflow.data.sources` opens others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.errors import UserError

Indices = npt.NDArray[np.int64]


def fault_of(samples: Samples, name: str) -> UserError | None:
    """Why a column that is stored cannot fill an input, such as missing values; None if it can, or is not stored."""
    return samples.fault_of(name) if isinstance(samples, Faulty) else None


@runtime_checkable
class Faulty(Protocol):
    """Samples whose columns may not all be fit for an input."""

    def fault_of(self, name: str) -> UserError | None:
        """Why a column cannot fill an input."""
        ...


@dataclass(frozen=True)
class Reading:
    """What a set says about how it is read."""

    skipped: int = 0
    """Bad rows, which are not among the samples."""
    bad_rows: Sequence[str] = ()
    """The first of them, each with file and line."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Column or input -> how it is made, as plain data: classes, means, deviations."""


def reading_of(samples: Samples) -> Reading:
    """How a set is read; empty for sets whose samples are stored as they are."""
    return samples.reading if isinstance(samples, Read) else Reading()


@runtime_checkable
class Read(Protocol):
    """Samples that are made from something else."""

    @property
    def reading(self) -> Reading:
        """How they are made."""
        ...


@runtime_checkable
class Identified(Protocol):
    """Samples that know a hash of their content."""

    @property
    def digest(self) -> str:
        """The hash, as hexadecimal digits."""
        ...


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
class Classified(Protocol):
    """Samples whose labels are numbers of named classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class; empty if the labels have no names."""
        ...

    def with_classes(self, classes: tuple[str, ...], location: str) -> Samples:
        """The samples with the numbers of another table. Raises UserError at `location` for a class that it lacks."""
        ...


@runtime_checkable
class Epochs(Protocol):
    """Samples that differ between epochs, as those with transforms do; `read` gives those of epoch 0."""

    def at(self, epoch: int) -> Samples:
        """The samples of an epoch."""
        ...


def part_of(samples: Samples, name: str, indices: Indices) -> Array | Ragged:
    """A column of some samples, whether it is of fixed size or not."""
    column = samples.columns[name]
    if not column.variable:
        return samples.read(name, indices)
    return Ragged.of(samples.read_ragged(name, indices), column.dtype)


class FixedColumns:
    """For sets of which no column is of variable length."""

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """There is no such column. Raises KeyError."""
        raise KeyError(name)

    def lengths(self, name: str) -> Indices:
        """There is no such column. Raises KeyError."""
        raise KeyError(name)


class Around:
    """For sets that make the columns of another one: what they have in common with it."""

    dataset: Samples

    @property
    def path(self) -> Path:
        """The file or folder of the set."""
        return self.dataset.path

    @property
    def shard_counts(self) -> Sequence[int]:
        """Those of the set."""
        return self.dataset.shard_counts

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def reading(self) -> Reading:
        """That of the set."""
        return reading_of(self.dataset)

    def fault_of(self, name: str) -> UserError | None:
        """Why a column of the set cannot fill an input."""
        return fault_of(self.dataset, name)
