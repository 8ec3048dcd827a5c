"""Tokens of a step: labels that are not ignored, if there is one per token."""

from __future__ import annotations

import numpy as np
import pytest

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.steps.tokens import count_tokens, token_labels
from ortflow.workflow.trainer import MicroBatch

TOKENS = BatchInput("tokens", "int64", (None, None), "data")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (BatchInput("labels", "int64", (None, 8), "label"), "labels"),
        (BatchInput("labels", "int64", (None,), "label"), None),  # a class per sample
        (BatchInput("labels", "float32", (None, 8), "label"), None),  # a regression
        (BatchInput("labels", "int64", (None, 8, 8), "label"), None),  # a class per pixel
    ],
)
def test_which_label_has_tokens(label: BatchInput, expected: str | None) -> None:
    assert token_labels([TOKENS, label]) == expected


def test_labels_that_count_are_counted_over_all_ranks() -> None:
    labels = np.array([[1, 2, -100], [3, -100, -100], [7, 7, 7]])
    batches = [MicroBatch({"labels": labels}, 2), MicroBatch({"labels": labels}, 0)]
    assert count_tokens(batches, "labels", -100, 2) == 3
    assert count_tokens(batches, "labels", -100, 8) == 12
    assert count_tokens(batches, "labels", None, 2) == 6
    assert count_tokens(batches, None, -100, 2) is None
    assert count_tokens(batches[1:], "labels", -100, 2) is None
