"""Scans every value of a column, in parts.

Called by the checks if the shards' own minimum and maximum do not decide.
"""

from __future__ import annotations

import numpy as np

from ortflow.workflow.data.samples import Samples, part_of
from ortflow.workflow.data.schema import Array, Ragged, Range
from ortflow.workflow.spec.mapping import ColumnReference

ROWS = 1 << 12
"""Samples scanned at a time."""


def first_outside(
    dataset: Samples, reference: ColumnReference, span: Range, allowed: int | None = None, *, whole: bool = False
) -> tuple[int, float] | None:
    """The first sample with a number outside `span` (smallest and largest), and that number; None if there is none.

    With `whole`, fractions are outside as well. The value `allowed` and non-finite values are accepted.
    """
    column = dataset.columns[reference.column]
    least, largest = span
    fractions = whole and column.dtype.kind == "f"
    has_range = column.minimum is not None and column.maximum is not None and not fractions
    if has_range and least <= column.minimum and column.maximum <= largest:  # type: ignore[operator]
        return None
    for first, samples in dataset.scan(reference.column):
        for start in range(0, len(samples), ROWS):
            outlier = _outside(samples, slice(start, start + ROWS), reference, span, allowed, fractions)
            if outlier is not None:
                return first + start + outlier[0], outlier[1]
    return None


def first_not_finite(dataset: Samples, reference: ColumnReference) -> tuple[int, float] | None:
    """The first sample with NaN or infinity, and that value; None if there is none."""
    column = dataset.columns[reference.column]
    if column.dtype.kind != "f" or column.is_finite:
        return None
    for first, samples in dataset.scan(reference.column):
        for start in range(0, len(samples), ROWS):
            values, owners = values_of(samples, slice(start, start + ROWS), reference)
            finite = np.isfinite(values)
            if not finite.all():
                at = int(np.argmin(finite))
                return first + start + int(owners[at]), values[at].item()
    return None


def has_finite(dataset: Samples, reference: ColumnReference) -> bool:
    """Whether an element of a column is neither NaN nor infinite."""
    column = dataset.columns[reference.column]
    if column.dtype.kind != "f" or column.is_finite:
        return True
    # A part of a scan may be hundreds of images: the first sample mostly decides.
    first_sample = part_of(dataset, reference.column, np.zeros(1, np.int64))
    return _has_finite(first_sample, reference) or any(
        _has_finite(samples, reference) for _, samples in dataset.scan(reference.column)
    )


def _has_finite(samples: Array | Ragged, reference: ColumnReference) -> bool:
    parts = (slice(start, start + ROWS) for start in range(0, len(samples), ROWS))
    return any(np.isfinite(values_of(samples, rows, reference)[0]).any() for rows in parts)


def _outside(
    samples: Array | Ragged,
    rows: slice,
    reference: ColumnReference,
    span: Range,
    allowed: int | None,
    fractions: bool,
) -> tuple[int, float] | None:
    values, owners = values_of(samples, rows, reference)
    outside = (values < span[0]) | (values > span[1])
    if fractions:
        outside |= values != np.rint(values)
    outside &= np.isfinite(values)
    if allowed is not None:
        outside &= values != allowed
    if not outside.any():
        return None
    at = int(np.argmax(outside))
    return int(owners[at]), values[at].item()


def values_of(samples: Array | Ragged, rows: slice, reference: ColumnReference) -> tuple[Array, Array]:
    """The numbers of some samples, flat, and for each the place of its sample among them, in rising order."""
    if isinstance(samples, Ragged):
        numbers = range(len(samples))[rows]
        parts = [samples[number][reference.slice] for number in numbers]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    part = samples[rows] if reference.whole else samples[rows, reference.slice]
    values = part.reshape(-1)
    return values, np.arange(len(values)) // max(1, len(values) // len(part))
