"""Gradients of nodes that leave out their attributes and optional inputs: the rules' defaults are those of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check

RANDOM = np.random.default_rng(9)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return RANDOM.normal(size=shape) * scale


def apart(*shape: int) -> np.ndarray:
    """Values without neighbours, for operators that choose among them."""
    return RANDOM.permutation(int(np.prod(shape))).reshape(shape) * 0.5


SMALL = 3e-3
"""A scale at which the variance is about a norm's default epsilon."""
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("CumSum", {"a": normal(2, 3), "axis": np.array(0)}, ["a"]),
    ("Trilu", {"a": normal(3, 4)}, ["a"]),
    ("Transpose", {"a": normal(2, 3, 4)}, ["a"]),
    ("Flatten", {"a": normal(2, 3, 4)}, ["a"]),
    ("Squeeze", {"a": normal(1, 3, 1)}, ["a"]),
    ("Pad", {"a": normal(2, 3), "pads": np.array([0, 1, 2, 0])}, ["a"]),
    ("Gather", {"a": normal(3, 4), "places": np.array([2, 0, 2])}, ["a"]),
    ("GatherElements", {"a": normal(3, 4), "places": np.array([[2, 0, 1, 1], [0, 0, 2, 1]])}, ["a"]),
    ("GatherND", {"a": normal(3, 4), "places": np.array([[2, 1], [0, 3]])}, ["a"]),
    (
        "ScatterElements",
        {"a": normal(3, 2), "places": np.array([[2, 0]]), "b": normal(1, 2)},
        ["a", "b"],
    ),
    ("ScatterND", {"a": normal(3, 2), "places": np.array([[2], [0]]), "b": normal(2, 2)}, ["a", "b"]),
    ("Gemm", {"a": normal(2, 3), "b": normal(3, 4), "c": normal(4)}, ["a", "b", "c"]),
    ("Gemm", {"a": normal(2, 3), "b": normal(3, 4)}, ["a", "b"]),
    ("Softmax", {"a": normal(2, 3, 4)}, ["a"]),
    ("LogSoftmax", {"a": normal(2, 3, 4)}, ["a"]),
    ("LayerNormalization", {"a": normal(3, 4, scale=SMALL), "scale": normal(4), "bias": normal(4)}, ["a", "scale"]),
    ("InstanceNormalization", {"a": normal(2, 3, 4, scale=SMALL), "scale": normal(3), "bias": normal(3)}, ["a"]),
    (
        "BatchNormalization",
        {
            "a": normal(2, 3, 4), "scale": normal(3), "bias": normal(3), "mean": normal(3),
            "variance": np.array([1e-5, 1e-4, 1.0]),
        },
        ["a", "scale", "bias"],
    ),
    ("Conv", {"a": normal(1, 2, 4, 5), "w": normal(3, 2, 2, 3)}, ["a"]),
    ("ConvTranspose", {"a": normal(1, 2, 4, 5), "w": normal(2, 3, 2, 3)}, ["a"]),
    *((f"Reduce{kind}", {"a": apart(2, 3) + 1.0}, ["a"]) for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2")),
    *((f"Reduce{kind}", {"a": apart(2, 3) + 1.0}, ["a"]) for kind in ("SumSquare", "LogSum", "LogSumExp")),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "inputs", "parameters"), CASES, ids=[case[0] for case in CASES])
def test_without_attributes(operator: str, inputs: dict[str, Any], parameters: list[str]) -> None:
    check(operator, inputs, parameters)


def test_the_largest_without_attributes() -> None:
    check("TopK", {"a": apart(3, 4), "k": np.array([2])}, ["a"], outputs=2)


POOLED = apart(1, 2, 5, 6)


@pytest.mark.parametrize("operator", ["AveragePool", "MaxPool", "LpPool"])
def test_pooling_with_a_kernel_only(operator: str) -> None:
    check(operator, {"a": POOLED + 1.0}, ["a"], kernel_shape=[2, 3])


@pytest.mark.parametrize("operator", ["AveragePool", "LpPool"])
def test_pooling_with_a_kernel_and_a_border(operator: str) -> None:
    check(operator, {"a": POOLED + 1.0}, ["a"], kernel_shape=[2, 3], pads=[1, 1, 0, 1])
