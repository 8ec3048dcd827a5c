"""A micro-batch and its inputs, as plain data. `check` compares the inputs with the columns of a set."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy.typing as npt

Role = Literal["data", "label"]


@dataclass(frozen=True)
class BatchInput:
    """An array of a batch: `dtype` in numpy's names, `shape` [samples, ...] with None for an axis that varies."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    role: Role = "data"


@dataclass(frozen=True)
class LabelSequences:
    """What the samples of a label are sequences of: numbers of classes, without the blank."""

    blank: int
    lengths: str | None = None
    """Input with the number of labels of each sample; without it, labels below 0 do not count."""


@dataclass(frozen=True)
class Limits:
    """Restrictions of a trainer beyond types and shapes."""

    bounds: Mapping[str, int] = field(default_factory=dict)
    """Input -> exclusive upper bound of its integers: size of the vocabulary, number of classes."""
    ignore_index: int | None = None
    """Value of a label that has weight 0; exempt from the bounds."""
    pad_value: Mapping[str, float] | None = None
    """Input -> padding value of shorter samples; by default 0, and `ignore_index` for labels."""
    truths: Collection[str] = ()
    """Labels that must be 0 or 1 if they are integers, and from 0 to 1 otherwise."""
    signs: Collection[str] = ()
    """Labels that must be 0 or 1, whatever their type."""
    classes: Collection[str] = ()
    """Labels that are numbers of classes, from 0; their bound is the number of classes, if it is known."""
    counts: Collection[str] = ()
    """Labels that must not be below 0."""
    sequences: Mapping[str, LabelSequences] = field(default_factory=dict)
    """Labels that are sequences of classes."""


@dataclass(frozen=True)
class MicroBatch:
    """Arrays [samples, ...] by input, and the number of leading rows that are real samples."""

    arrays: Mapping[str, npt.NDArray[Any]]
    count: int
