"""Tokens of a step: labels that count, where there is one for each token."""

from __future__ import annotations

import numpy as np
import pytest

from ortflow.workflow.graph.types import GraphInput
from ortflow.workflow.spec.model import CrossEntropy, OwnLoss
from ortflow.workflow.steps.tokens import count_tokens, token_labels
from ortflow.workflow.trainer import MicroBatch

TOKENS = GraphInput("tokens", "int64", (None, None), "data")
LOSS = CrossEntropy(kind="cross_entropy", ignore_index=-100)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (GraphInput("labels", "int64", (None, 8), "label"), "labels"),
        (GraphInput("labels", "int64", (None,), "label"), None),  # a class a sample
        (GraphInput("labels", "float32", (None, 8), "label"), None),  # a regression
        (GraphInput("labels", "int64", (None, 8, 8), "label"), None),  # a class a pixel
    ],
)
def test_which_label_has_tokens(label: GraphInput, expected: str | None) -> None:
    assert token_labels([TOKENS, label]) == expected


def test_labels_that_count_are_counted_over_all_ranks() -> None:
    labels = np.array([[1, 2, -100], [3, -100, -100], [7, 7, 7]])
    batches = [MicroBatch({"labels": labels}, 2), MicroBatch({"labels": labels}, 0)]
    assert count_tokens(batches, "labels", LOSS, 2) == 3
    assert count_tokens(batches, "labels", LOSS, 8) == 12
    assert count_tokens(batches, "labels", OwnLoss(kind="output", output="loss"), 2) == 6
    assert count_tokens(batches, None, LOSS, 2) is None
    assert count_tokens(batches[1:], "labels", LOSS, 2) is None
