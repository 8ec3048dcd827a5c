"""Assembles micro-batches from samples: selects, slices, converts and pads columns.

Called by the batches in their background thread; `check` has rejected invalid data before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortflow.workflow.data.samples import Indices, Samples
from ortflow.workflow.data.schema import Array
from ortflow.workflow.spec.mapping import ColumnReference


@dataclass(frozen=True)
class Feed:
    """How one input is filled from a column or a slice of it.

    Variable-length samples are padded to `length`; if None, to the longest of the micro-batch.
    """

    input: str
    dtype: np.dtype[Any]
    source: ColumnReference
    pad: float = 0
    length: int | None = None


def collate(dataset: Samples, feeds: Sequence[Feed], batches: Sequence[Indices]) -> list[dict[str, Array]]:
    """The samples of each micro-batch, as {input: array [samples, ...]}.

    Samples of all micro-batches are read together, and a column that fills several inputs only once: for small batches,
    numpy's calls cost more than the bytes.
    """
    ends = list(itertools.accumulate(map(len, batches)))
    parts = [slice(end - len(batch), end) for end, batch in zip(ends, batches, strict=True)]
    indices = np.concatenate(batches)
    columns: dict[str, Array | list[Array]] = {}
    collated: list[dict[str, Array]] = [{} for _ in batches]
    for feed in feeds:
        name = feed.source.column
        if name not in columns:
            read = dataset.read_ragged if dataset.columns[name].variable else dataset.read
            columns[name] = read(name, indices)
        for batch, array in zip(collated, _fill(feed, columns[name], parts), strict=True):
            batch[feed.input] = array
    return collated


def _fill(feed: Feed, samples: Array | list[Array], parts: Sequence[slice]) -> list[Array]:
    if isinstance(samples, list):
        sliced = [sample[feed.source.slice] for sample in samples]
        return [_padded(feed, sliced[part]) for part in parts]
    array = samples if feed.source.whole else samples[:, feed.source.slice]
    array = array.astype(feed.dtype, order="C", copy=False)
    return [array[part] for part in parts]


def _padded(feed: Feed, samples: list[Array]) -> Array:
    length = max(map(len, samples), default=0) if feed.length is None else feed.length
    batch = np.full((len(samples), length), feed.pad, feed.dtype)
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample)] = sample
    return batch
