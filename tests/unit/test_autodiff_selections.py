"""Gradients of operators that choose between elements, of powers and of remainders."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check, check_against, gradients_of, model_of
from onnx import helper

from ortflow.workflow.graph.ir.origin import CLASSES

RANDOM = np.random.default_rng(3)
SHAPES = [((2, 3), (2, 3)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 1, 3), (4, 1))]


def normal(shape: tuple[int, ...]) -> np.ndarray:
    return RANDOM.normal(size=shape)


@pytest.mark.parametrize("condition", [(2, 3), (3,), (4, 2, 1), ()], ids=str)
@pytest.mark.parametrize("shapes", SHAPES[:4], ids=str)
def test_where(shapes: tuple[tuple[int, ...], tuple[int, ...]], condition: tuple[int, ...]) -> None:
    inputs = {"xchoice": RANDOM.random(condition) < 0.5, "a": normal(shapes[0]), "b": normal(shapes[1])}
    check("Where", inputs, ["a", "b"])
    check("Where", inputs, ["b"])


@pytest.mark.parametrize("operator", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_variadic(operator: str, count: int) -> None:
    inputs = dict(zip("abc"[:count], map(normal, [(4, 2, 3), (3,), (2, 1)]), strict=False))
    check(operator, inputs, list(inputs))
    check(operator, inputs, ["a"])


def test_equal_elements_share_the_gradient() -> None:
    inputs = {"a": np.array([1.0, 2.0, 0.0]), "b": np.array([1.0, 0.0, 2.0])}
    # The loss is (y + y^2) / 2, with y = 1, 2, 2.
    expected = {"a": np.array([0.75, 2.5, 0]), "b": np.array([0.75, 0, 2.5])}
    check_against(expected, "Max", inputs, ["a", "b"])


@pytest.mark.parametrize("limits", [(-0.5, 0.5), (None, 0.5), (-0.5, None), (None, None)], ids=str)
def test_clip(limits: tuple[float | None, float | None]) -> None:
    low, high = (None if limit is None else np.array(limit) for limit in limits)
    check("Clip", {"a": normal((4, 5)), "low": low, "high": high}, ["a"])


def test_no_gradient_passes_at_the_limits_of_clip() -> None:
    inputs = {"a": np.array([0.0, 3.0, 6.0]), "low": np.array(0.0), "high": np.array(6.0)}
    check_against({"a": np.array([0, 3.5, 0])}, "Clip", inputs, ["a"])


def test_an_infinite_derivative_behind_a_limit_stops_there() -> None:
    """`clamp(min=0).sqrt()` of distances between equal points, as in PyTorch, where it is not NaN."""
    model = model_of("Clip", {"a": np.zeros(3), "low": np.array(0.0)}, ["a"])
    model.graph.node[0].output[0] = "clipped"
    model.graph.node.insert(1, helper.make_node("Sqrt", ["clipped"], ["y0"], "root"))
    a = np.array([-1.0, 0.0, 4.0])
    # The loss is (y + y^2) / 2, so dy/da = (1 + 2 y) / (4 y).
    np.testing.assert_allclose(gradients_of(model, {"a": a}, ["a"])["a"], [0, 0, 0.625])


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, -1.0, -2.5], ids=str)
def test_power_by_a_number(exponent: float) -> None:
    check("Pow", {"a": RANDOM.uniform(0.5, 2, (2, 3)), "exponent": np.array(exponent)}, ["a"])


@pytest.mark.parametrize("exponent", [1, 2, 3, 4, -1, -2], ids=str)
def test_power_by_a_whole_number(exponent: int) -> None:
    base = normal((2, 3)) + 3 * np.array([[1, -1, 1]])
    check("Pow", {"a": base, "exponent": np.array([[[exponent]]])}, ["a"])
    check("Pow", {"a": base, "xexponent": np.array([exponent])}, ["a"])


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_trained_power(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = RANDOM.uniform(0.5, 2, shapes[0]), normal(shapes[1])
    check("Pow", {"a": a, "b": b}, ["a", "b"])
    check("Pow", {"xa": a, "b": b}, ["b"])


def test_power_at_zero() -> None:
    inputs = {"a": np.array([0.0, 0.0, 0.0, 2.0]), "b": np.array([0.0, 1.0, 2.0, 0.0])}
    # The loss is (y + y^2) / 2, with y = 1, 0, 0, 1: as in PyTorch.
    expected = {"a": np.array([0, 0.5, 0, 0]), "b": np.array([0, 0, 0, 1.5 * np.log(2)])}
    check_against(expected, "Pow", inputs, ["a", "b"])


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_remainder(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = 5 * normal(shapes[0]), RANDOM.uniform(0.5, 2, shapes[1]) * np.sign(normal(shapes[1]))
    check("Mod", {"a": a, "b": b}, ["a", "b"], fmod=1)


@pytest.mark.parametrize("operator", ["Floor", "Ceil", "Hardmax", "Round", "Sign"])
def test_a_step_stops_the_gradient(operator: str) -> None:
    inputs = {"a": normal((3,))}
    model = model_of(operator, inputs, ["a"])
    total = model.graph.node.pop().input[0]
    model.graph.node.append(helper.make_node("ReduceSum", ["a"], ["rest"], "rest", keepdims=0))
    model.graph.node.append(helper.make_node("Add", [total, "rest"], ["loss"], "loss"))
    np.testing.assert_array_equal(gradients_of(model, inputs, ["a"])["a"], 1)


@pytest.mark.parametrize(
    ("operator", "noted", "shares"),
    [
        ("Max", "aten.clamp.default", [0, 0, 1]),
        ("Min", "aten.clamp_max.default", [1, 0, 0]),
        ("Max", "aten.maximum.default", [0, 0.5, 1]),
        ("Min", "aten.minimum.default", [1, 0.5, 0]),
    ],
)
def test_a_limit_of_pytorchs_clamp_has_no_gradient(operator: str, noted: str, shares: list[float]) -> None:
    """The exporter writes a clamp by one number as Max or Min with a constant."""
    inputs = {"a": np.array([-1.0, 0.5, 2.0]), "limit": np.array(0.5)}
    model = model_of(operator, inputs, ["a"])
    model.graph.node[0].metadata_props.add(key=CLASSES, value=str(["", noted]))
    slope = inputs["a"] + 0.5  # of the loss (y y + y) / 2, where the element is not limited
    np.testing.assert_allclose(gradients_of(model, inputs, ["a"])["a"], np.array(shares) * slope)
