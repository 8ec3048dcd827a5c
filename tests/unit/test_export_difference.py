"""How far a result of an exported file may be from PyTorch's: rounding is let through, a fault is not."""

from __future__ import annotations

import numpy as np
import pytest

from ortflow.exporter.difference import gradient_differences, where_finite

NAME = "layer.weight"


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def faults(mine: float, single: float, double: float, *, largest: tuple[float, float]) -> dict[str, str]:
    """Of a gradient beside a larger one of norm `largest`, in single and in double precision."""
    first, second = (array(each) for each in largest)
    return gradient_differences(
        {"other": first, NAME: array(mine)},
        {"other": first, NAME: array(single)},
        {"other": second, NAME: array(double)},
        1e-3,
        {},
    )


def test_a_gradient_of_rounding_beside_rounding_of_1e21_is_no_fault() -> None:
    """LeViT at equal rows: each BatchNorm multiplies rounding by 300, and single precision is 1e9 times double's."""
    assert faults(8.6e9, 0.0, 0.0, largest=(1.2e21, 2e12)) == {}


@pytest.mark.parametrize("largest", [(2e12, 2e12), (2e12, 2e12 * (1 + 1e-6))])
def test_the_same_gradient_is_a_fault_where_single_precision_is_right(largest: tuple[float, float]) -> None:
    assert NAME in str(faults(8.6e9, 0.0, 0.0, largest=largest))


def test_one_array_stays_one_where_it_is_not_finite() -> None:
    mine, own = array(1, 2, 3), array(1, np.nan, 3)
    actual, single, double = where_finite(mine, own, own)
    assert single is double
    assert actual.tolist() == single.tolist() == [1, 0, 3]
    assert where_finite(mine, mine, mine)[1] is mine
