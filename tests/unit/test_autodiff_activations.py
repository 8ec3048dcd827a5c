"""Gradients of activations with a kink or parameters, and of the Gelu family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gradients import check, gradients_of, model_of
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.onnx_runtime import onnxruntime

RANDOM = np.random.default_rng(2)
VALUES = RANDOM.normal(size=(3, 4)) * 3
ERF = np.vectorize(math.erf)


class Gelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, approximate: str = "none") -> tuple[Any]:  # type: ignore[override]
        return (x * (1 + ERF(x / math.sqrt(2))) / 2,)


class BiasGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, bias: Any) -> tuple[Any]:  # type: ignore[override]
        x = x + bias
        return (x * (1 + ERF(x / math.sqrt(2))) / 2,)


class FastGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, bias: Any = 0) -> tuple[Any]:  # type: ignore[override]
        x = x + bias
        return (x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,)


class QuickGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, alpha: float = 1.702) -> tuple[Any]:  # type: ignore[override]
        return (x / (1 + np.exp(-(alpha or 1.702) * x)),)


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("Celu", {}),
        ("Celu", {"alpha": 0.5}),
        ("Elu", {}),
        ("Elu", {"alpha": 2.0}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 0.1, "beta": 0.4}),
        ("HardSwish", {}),
        ("LeakyRelu", {}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("Mish", {}),
        ("Selu", {}),
        ("Selu", {"alpha": 1.5, "gamma": 1.0}),
        ("ThresholdedRelu", {}),
        ("ThresholdedRelu", {"alpha": 0.2}),
    ],
    ids=str,
)
def test_activation(operator: str, attributes: dict[str, float]) -> None:
    check(operator, {"a": VALUES}, ["a"], **attributes)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (3, 4)], ids=str)
def test_parametric_relu(shape: tuple[int, ...]) -> None:
    slope = RANDOM.uniform(0.1, 0.5, shape)
    check("PRelu", {"a": VALUES, "slope": slope}, ["a", "slope"])
    check("PRelu", {"a": VALUES, "slope": slope}, ["a"])
    check("PRelu", {"xa": VALUES, "slope": slope}, ["slope"])


@pytest.mark.parametrize(
    ("operator", "kinks"), [("HardSwish", (-3, 3)), ("HardSigmoid", (-2.5, 2.5)), ("ThresholdedRelu", (1,))]
)
def test_near_a_kink(operator: str, kinks: tuple[float, ...]) -> None:
    near = np.array([kink + off for kink in kinks for off in (-0.9, -0.1, 0.1, 0.9)])
    check(operator, {"a": near}, ["a"])


@pytest.mark.parametrize("operator", ["Elu", "Selu", "Celu", "Mish", "HardSwish"])
def test_gradient_far_from_zero_is_finite(operator: str) -> None:
    far = {"a": np.array([-200.0, 200.0])}
    found = gradients_of(model_of(operator, far, ["a"]), far, ["a"])["a"]
    assert np.isfinite(found).all()
    assert found[1] > 100


@pytest.mark.parametrize("kind", [Gelu, FastGelu, QuickGelu])
def test_gelu(kind: type[OpRun]) -> None:
    check(kind.__name__, {"a": VALUES}, ["a"], domain="com.microsoft", new_ops=[kind])


def test_quick_gelu_with_another_slope() -> None:
    check("QuickGelu", {"a": VALUES}, ["a"], domain="com.microsoft", new_ops=[QuickGelu], alpha=1.3)


@pytest.mark.parametrize("parameters", [["a", "bias"], ["a"], ["bias"]], ids=str)
@pytest.mark.parametrize("kind", [BiasGelu, FastGelu])
def test_gelu_with_a_bias(kind: type[OpRun], parameters: list[str]) -> None:
    x = "a" if "a" in parameters else "xa"
    inputs = {x: VALUES, "bias": RANDOM.normal(size=4)}
    check(kind.__name__, inputs, parameters, domain="com.microsoft", new_ops=[kind])


@pytest.mark.parametrize(
    ("operator", "given", "slope"),
    [
        (
            "GeluGrad",
            lambda x: x,
            lambda x: (1 + ERF(x / math.sqrt(2))) / 2 + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
        ),
        ("FastGeluGrad", lambda x: x, lambda x: (fast_gelu(x + 1e-6) - fast_gelu(x - 1e-6)) / 2e-6),
        ("SigmoidGrad", lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2),
    ],
)
def test_gradient_operators_are_composed_of_standard_ones(operator: str, given: Any, slope: Any) -> None:
    """SigmoidGrad takes the sigmoid; `optimize.gelu` writes it."""
    x, outer = np.linspace(-4, 4, 33), np.linspace(1, 2, 33)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [33]) for name in ("dy", "v", "dx")]
    made = helper.make_node(operator, ["dy", "v"], ["dx"], "node", domain="com.microsoft")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([made], "case", values[:2], values[2:])
    model = compose(helper.make_model(graph, ir_version=10, opset_imports=opsets))
    assert not any(node.domain for node in model.graph.node)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["dx"], {"dy": outer.astype(np.float32), "v": given(x).astype(np.float32)})
    np.testing.assert_allclose(found, outer * slope(x), rtol=1e-5, atol=1e-6)


def fast_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
