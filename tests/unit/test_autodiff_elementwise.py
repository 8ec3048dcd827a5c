"""Gradients of operators that work element by element."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check

RANDOM = np.random.default_rng(0)
SHAPES = [((2, 3), (2, 3)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 1, 3), (4, 1)), ((4,), (3, 2, 1))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
def test_arithmetic(operator: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (RANDOM.uniform(0.5, 2, shape) for shape in shapes)
    check(operator, {"a": a, "b": b}, ["a", "b"])
    check(operator, {"a": a, "xb": b}, ["a"])
    check(operator, {"xa": a, "b": b}, ["b"])
