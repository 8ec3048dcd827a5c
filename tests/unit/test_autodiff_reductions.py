"""Gradients of operators that reduce axes, and of running sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, check_against, gradients_of, model_of

from ortflow.workflow.graph.ir.origin import CLASSES
from ortflow.workflow.onnx_runtime import onnxruntime

RANDOM = np.random.default_rng(6)
OPERATORS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]


def values(operator: str) -> np.ndarray:
    found = RANDOM.normal(size=(2, 3, 4))
    return np.abs(found) + 0.5 if operator == "LogSum" else found


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [-1], [1, -1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_reduction(operator: str, axes: list[int] | None, keepdims: int) -> None:
    inputs: dict[str, Any] = {"a": values(operator)}
    if axes is not None:
        inputs["axes"] = np.array(axes)
    check(f"Reduce{operator}", inputs, ["a"], keepdims=keepdims)


@pytest.mark.parametrize("operator", OPERATORS)
def test_reduction_over_computed_axes(operator: str) -> None:
    check(f"Reduce{operator}", {"a": values(operator), "xaxes": np.array([2, 0])}, ["a"], keepdims=1)


@pytest.mark.skipif(onnxruntime.__version__.startswith("1.19."), reason="ONNX Runtime 1.19 refuses such a node itself")
@pytest.mark.parametrize("operator", ["Sum", "Mean", "Max", "Prod", "LogSumExp"])
def test_reduction_over_no_axes(operator: str) -> None:
    """With noop_with_empty_axes a reduction without axes returns its input."""
    y = values(operator)
    # The loss is (y + y^2) / 2.
    check_against({"a": 0.5 + y}, f"Reduce{operator}", {"a": y}, ["a"], keepdims=0, noop_with_empty_axes=1)


def test_equal_extremes_share_the_gradient() -> None:
    inputs = {"a": np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), "axes": np.array([1])}
    # The loss is (y + y^2) / 2, with y = 3 and 2.
    expected = np.array([[0, 1.75, 1.75], [2.5 / 3] * 3])
    check_against({"a": expected}, "ReduceMax", inputs, ["a"], keepdims=0)


@pytest.mark.parametrize("zeros", [1, 2])
def test_product_with_zeros(zeros: int) -> None:
    a = values("Prod")
    a[0, 1, :zeros] = 0
    check("ReduceProd", {"a": a, "axes": np.array([2])}, ["a"], keepdims=0)


def test_root_of_squares_at_zero() -> None:
    check_against({"a": np.zeros((2, 3))}, "ReduceL2", {"a": np.zeros((2, 3)), "axes": np.array([1])}, ["a"])


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_sum(axis: int, reverse: int, exclusive: int) -> None:
    inputs = {"a": values("Sum"), "axis": np.array(axis)}
    check("CumSum", inputs, ["a"], reverse=reverse, exclusive=exclusive)


def test_a_running_sum_without_attributes() -> None:
    check("CumSum", {"a": values("Sum"), "axis": np.array(1)}, ["a"])


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize(
    ("axes", "noted", "shares"),
    [
        ([1], "aten.amax", [[0, 0.5, 0.5], [0.5, 0.5, 0]]),
        ([1], "aten.max.dim", [[0, 1, 0], [1, 0, 0]]),
        ([-1], "aten.min.dim", [[0, 1, 0], [1, 0, 0]]),
        ([0, 1], "aten.max.dim", [[0, 0.5, 0.5], [0, 0, 0]]),
    ],
)
def test_which_of_equal_extremes_gets_the_gradient(
    operator: str, keepdims: int, axes: list[int], noted: str, shares: list[list[float]]
) -> None:
    """PyTorch's max(dim) gives it to the first, its amax divides it, and so do operators of other exporters."""
    sign = 1 if operator == "ReduceMax" else -1
    inputs = {"a": sign * np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]), "axes": np.array(axes)}
    model = model_of(operator, inputs, ["a"], keepdims=keepdims)
    model.graph.node[0].metadata_props.add(key=CLASSES, value=str(["", noted]))
    slope = inputs["a"] + 0.5  # of the loss (y y + y) / 2, where an element is the extreme
    np.testing.assert_allclose(gradients_of(model, inputs, ["a"])["a"], shares * slope)
