"""Gradients of functions of one number."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check, check_against

RANDOM = np.random.default_rng(1)
NORMAL = RANDOM.normal(size=(3, 5))
POSITIVE = RANDOM.uniform(0.3, 3, (3, 5))
INSIDE = RANDOM.uniform(-0.9, 0.9, (3, 5))
VALUES = {
    **dict.fromkeys(["Log", "Sqrt", "Reciprocal"], POSITIVE),
    **dict.fromkeys(["Acos", "Asin", "Atanh"], INSIDE),
    "Acosh": POSITIVE + 1,
}


OTHERS = [
    *("Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "Neg", "Relu", "Sigmoid", "Sin", "Sinh", "Softplus"),
    *("Softsign", "Tan", "Tanh"),
]


@pytest.mark.parametrize("operator", [*VALUES, *OTHERS])
def test_function(operator: str) -> None:
    check(operator, {"a": VALUES.get(operator, NORMAL)}, ["a"])


@pytest.mark.parametrize(
    ("operator", "at", "expected"),
    [
        ("Abs", 0, 0),
        ("Relu", 0, 0),
        ("Softsign", 0, 0.5),
        ("Softplus", 0, 0.25 + 0.5 * np.log(2)),
        ("Softplus", 200, 200.5),
        ("Softplus", -200, 0),
        ("Sigmoid", -200, 0),
        ("Tanh", 200, 0),
        ("Erf", 200, 0),
    ],
)
def test_gradient_at_zero_and_far_from_it(operator: str, at: float, expected: float) -> None:
    # The loss is (y + y^2) / 2.
    expected_gradient = {"a": np.full(2, float(expected))}
    check_against(expected_gradient, operator, {"a": np.full(2, float(at))}, ["a"])
