"""Scans every value of a column, in parts.

Called by the checks if the shards' own minimum and maximum do not decide.
"""

from __future__ import annotations

import numpy as np

from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.schema import Array, Ragged, Range
from ortflow.workflow.spec.mapping import ColumnReference

ROWS = 1 << 12
"""Samples scanned at a time."""


def first_outside(
    dataset: Samples, reference: ColumnReference, span: Range, allowed: int | None = None
) -> tuple[int, float] | None:
    """The first sample with a number outside `span` (smallest and largest), and that number; None if there is none.

    The value `allowed` and non-finite values are accepted.
    """
    column = dataset.columns[reference.column]
    least, largest = span
    has_range = column.minimum is not None and column.maximum is not None
    if has_range and least <= column.minimum and column.maximum <= largest:  # type: ignore[operator]
        return None
    for first, samples in dataset.scan(reference.column):
        for start in range(0, len(samples), ROWS):
            outlier = _outside(samples, slice(start, start + ROWS), reference, span, allowed)
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


def _outside(
    samples: Array | Ragged, rows: slice, reference: ColumnReference, span: Range, allowed: int | None
) -> tuple[int, float] | None:
    values, owners = values_of(samples, rows, reference)
    outside = ((values < span[0]) | (values > span[1])) & np.isfinite(values)
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
