"""Sets of samples for tests of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.schema import Ragged
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.spec.mapping import parse_reference

Array = npt.NDArray[Any]


def write_batches(path: Path, *batches: dict[str, Array | Ragged], shard_samples: int | None = None) -> Dataset:
    """Write one record batch for each of `batches`, and open the set."""
    write_set(path, (record_batch(batch) for batch in batches), shard_samples=shard_samples)
    return Dataset.open(path)


def numbered(path: Path, count: int) -> Dataset:
    """A set whose column `number` identifies the sample."""
    return write_batches(path, {"number": np.arange(count)})


def ragged(samples: Sequence[Sequence[int]], dtype: str = "int64") -> Ragged:
    """Samples of different length."""
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Ragged(np.array([value for sample in samples for value in sample], dtype), offsets)


def feed(name: str, source: str, dtype: str = "int64", pad: float = 0, length: int | None = None) -> Feed:
    """The source of a graph input."""
    return Feed(name, np.dtype(dtype), parse_reference(source), pad, length)
