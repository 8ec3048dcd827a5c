"""Number of tokens per step, for the speed in tokens per second. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.trainer import MicroBatch


def token_labels(inputs: Sequence[BatchInput]) -> str | None:
    """The label with one class per token, integers of shape [batch, length]; None if there is none."""
    names = (
        batch_input.name
        for batch_input in inputs
        if batch_input.role == "label" and len(batch_input.shape) == 2 and batch_input.dtype.startswith("int")
    )
    return next(names, None)


def count_tokens(batches: Sequence[MicroBatch], label: str | None, ignored: int | None, samples: int) -> int | None:
    """Number of labels other than `ignored` in a step over all ranks, extrapolated from this rank's part of its
    `samples`.

    Exact on one rank, and on several if samples have equal length. None if there are no tokens.
    """
    rank_samples = sum(batch.count for batch in batches)
    if label is None or rank_samples == 0:
        return None
    labels = [batch.arrays[label][: batch.count] for batch in batches]
    counted = sum(array.size if ignored is None else int(np.count_nonzero(array != ignored)) for array in labels)
    return round(counted * samples / rank_samples)
