"""A micro-batch, and what a trainer reads of every one. Plain data: `check` compares it with the columns of a set."""

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
class Limits:
    """What a trainer can take beyond types and shapes."""

    bounds: Mapping[str, int] = field(default_factory=dict)
    """Input -> first integer that is too large: the vocabulary's size, the number of classes."""
    ignore_index: int | None = None
    """Value of a label that weighs nothing, whatever the bound."""
    pad_value: Mapping[str, float] | None = None
    """Input -> what shorter samples are padded with; by default 0, and `ignore_index` for labels."""
    truths: Collection[str] = ()
    """Labels that are 0 or 1 where they are integers."""


@dataclass(frozen=True)
class MicroBatch:
    """Arrays [samples, ...] by input, and how many of their rows are real samples: the first so many."""

    arrays: Mapping[str, npt.NDArray[Any]]
    count: int
