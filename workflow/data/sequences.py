"""Finds a label that cannot be one of its sequence, as the loss `ctc` reads it. Called by `check`."""

from __future__ import annotations

import numpy as np

from ortflow.workflow.data.inputs import LabelSequences
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.scan import ROWS, values_of
from ortflow.workflow.spec.mapping import ColumnReference


def first_wrong_label(
    dataset: Samples,
    labels: ColumnReference,
    lengths: ColumnReference | None,
    sequences: LabelSequences,
    classes: int | None,
) -> tuple[int, int] | None:
    """The first sample with a label that is the blank, negative or beyond the classes, and that label; None if none is.

    `lengths` is the column with the number of labels of each sample; without it, labels below 0 do not count.
    """
    counts = None
    if lengths is not None:
        counts = np.concatenate(
            [values_of(part, slice(0, len(part)), lengths)[0] for _, part in dataset.scan(lengths.column)]
        )
    for first, samples in dataset.scan(labels.column):
        for start in range(0, len(samples), ROWS):
            values, owners = values_of(samples, slice(start, start + ROWS), labels)
            # Without lengths, the loss takes as many first places as there are labels of at least 0.
            numbers = np.bincount(owners, values >= 0) if counts is None else counts[first + start :]
            counted = np.arange(len(values)) - np.searchsorted(owners, owners) < numbers[owners]
            wrong = (values < 0) | (values == sequences.blank)
            if classes is not None:
                wrong |= values >= classes
            wrong &= counted
            if wrong.any():
                at = int(np.argmax(wrong))
                return first + start + int(owners[at]), int(values[at])
    return None
