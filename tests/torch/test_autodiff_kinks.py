"""Where several derivatives are valid, or a formula would divide by 0, the rules use PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from gradients import gradients_of, model_of

EDGES = [-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0]
F = torch.nn.functional
Function = Callable[..., Any]

ACTIVATIONS: list[tuple[str, Function, dict[str, Any]]] = [
    ("Abs", torch.abs, {}),
    ("Celu", F.celu, {}),
    ("Celu", lambda x: F.celu(x, 2.0), {"alpha": 2.0}),
    ("Elu", F.elu, {}),
    ("Elu", lambda x: F.elu(x, 0.5), {"alpha": 0.5}),
    ("HardSigmoid", F.hardsigmoid, {"alpha": 1 / 6, "beta": 0.5}),
    ("HardSwish", F.hardswish, {}),
    ("LeakyRelu", F.leaky_relu, {"alpha": 0.01}),
    ("Mish", F.mish, {}),
    ("Relu", F.relu, {}),
    ("Selu", F.selu, {}),
    ("Softplus", lambda x: F.softplus(x, threshold=100), {}),
    ("Softsign", F.softsign, {}),
    ("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), {"alpha": 0.5}),
]


def compare(operator: str, function: Function, inputs: dict[str, Any], parameters: list[str], **options: Any) -> None:
    """Gradients of the loss of `model_of`, (y + y^2) / 2 summed: PyTorch's in double precision, and the rules'."""
    given = {
        name: torch.tensor(array, dtype=torch.float64 if array.dtype.kind == "f" else None)
        for name, array in inputs.items()
    }
    for name in parameters:
        given[name].requires_grad_(True)
    y = function(*given.values())
    (0.5 * (y + y * y)).sum().backward()
    found = gradients_of(model_of(operator, inputs, parameters, **options), inputs, parameters)
    for name in parameters:
        np.testing.assert_allclose(found[name], given[name].grad.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("operator", "function", "attributes"), ACTIVATIONS, ids=str)
def test_activation_at_its_kinks(operator: str, function: Function, attributes: dict[str, Any]) -> None:
    compare(operator, function, {"a": np.array(EDGES)}, ["a"], **attributes)


def test_parametric_relu_at_zero() -> None:
    compare("PRelu", F.prelu, {"a": np.array(EDGES), "slope": np.array([0.3])}, ["a", "slope"])


def test_clip_is_relu6() -> None:
    def relu6(x: Any, *_: Any) -> Any:
        return F.relu6(x)

    compare("Clip", relu6, {"a": np.array(EDGES), "low": np.array(0.0), "high": np.array(6.0)}, ["a"])


@pytest.mark.parametrize(("operator", "function"), [("Max", torch.maximum), ("Min", torch.minimum)], ids=str)
def test_ties(operator: str, function: Function) -> None:
    inputs = {"a": np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), "b": np.array([2.0, 2.0, 2.0])}
    compare(operator, function, inputs, ["a", "b"])


@pytest.mark.parametrize(("operator", "function"), [("ReduceMax", torch.amax), ("ReduceMin", torch.amin)], ids=str)
def test_equal_extremes(operator: str, function: Function) -> None:
    inputs = {"a": np.array([[1.0, 3.0, 3.0], [1.0, 1.0, 1.0]]), "axes": np.array([1])}
    compare(operator, lambda a, axes: function(a, dim=1), inputs, ["a"], keepdims=0)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_with_zeros(zeros: int) -> None:
    a = np.array([[0.5, 2.0, -3.0, 4.0]])
    a[0, :zeros] = 0
    compare("ReduceProd", lambda a, axes: torch.prod(a, dim=1), {"a": a, "axes": np.array([1])}, ["a"], keepdims=0)


def test_norm_of_zeros() -> None:
    a = np.array([[0.0, 0.0], [3.0, 4.0]])
    inputs = {"a": a, "axes": np.array([1])}
    compare("ReduceL2", lambda a, axes: torch.linalg.vector_norm(a, dim=1), inputs, ["a"], keepdims=0)
    compare("ReduceL1", lambda a, axes: torch.linalg.vector_norm(a, 1, dim=1), inputs, ["a"], keepdims=0)


def test_powers_at_zero() -> None:
    inputs = {"a": np.array([0.0, 0.0, 0.0, 2.0, 2.0]), "b": np.array([0.0, 1.0, 2.5, 0.0, -1.0])}
    compare("Pow", torch.pow, inputs, ["a", "b"])


def test_remainder() -> None:
    a, b = np.array([5.5, -5.5, 5.5, -5.5, 0.5]), np.array([2.0, 2.0, -2.0, -2.0, 2.0])
    compare("Mod", torch.fmod, {"a": a, "b": b}, ["a", "b"], fmod=1)


@pytest.mark.parametrize("operator", ["Sigmoid", "Tanh", "Erf", "Exp", "Softplus", "Softsign", "Atan", "Asinh"])
def test_far_from_zero(operator: str) -> None:
    function = {"Softplus": lambda x: F.softplus(x, threshold=100), "Softsign": F.softsign}.get(operator)
    far = np.array([-80.0, -20.0, -9.0, 9.0, 20.0, 40.0])
    compare(operator, function or getattr(torch, operator.lower()), {"a": far}, ["a"])
