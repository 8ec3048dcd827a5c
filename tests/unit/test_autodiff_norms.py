"""Gradients of softmax, normalisations and the cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, model_of
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.onnx_runtime import onnxruntime

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(2, 3, 4))


class SimplifiedLayerNormalization(OpRun):
    def _run(self, x: Any, scale: Any, axis: Any = None, epsilon: Any = None, saved_output_type: Any = None) -> Any:
        axes = tuple(range((-1 if axis is None else axis) % x.ndim, x.ndim))
        return (x / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + (epsilon or 1e-5)) * scale,)


@pytest.mark.parametrize("axis", [None, -1, 0, 1, -2])
@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax(operator: str, axis: int | None) -> None:
    check(operator, {"a": X}, ["a"], **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("axis", [None, -1, 1, -2, 0])
def test_layer_normalization(axis: int | None, with_bias: bool) -> None:
    shape = X.shape[-1 if axis is None else axis :]
    inputs = {"a": X, "scale": RANDOM.normal(size=shape)}
    if with_bias:
        inputs["bias"] = RANDOM.normal(size=shape)
    attributes: dict[str, Any] = {"epsilon": 0.01} if axis is None else {"axis": axis}
    check("LayerNormalization", inputs, list(inputs), **attributes)
    check("LayerNormalization", inputs, ["scale"], **attributes)
    check("LayerNormalization", inputs, ["a"], **attributes)


def test_layer_normalization_of_one_element() -> None:
    inputs = {"a": X[:, :, :1], "scale": RANDOM.normal(size=1), "bias": RANDOM.normal(size=1)}
    check("LayerNormalization", inputs, ["scale", "bias"])


@pytest.mark.parametrize("axis", [None, 1])
def test_root_mean_square_normalization(axis: int | None) -> None:
    inputs = {"a": X, "scale": RANDOM.normal(size=X.shape[-1 if axis is None else axis :])}
    attributes = {} if axis is None else {"axis": axis}
    check("SimplifiedLayerNormalization", inputs, ["a", "scale"], new_ops=[SimplifiedLayerNormalization], **attributes)
    check("SimplifiedLayerNormalization", inputs, ["scale"], new_ops=[SimplifiedLayerNormalization], **attributes)


@pytest.mark.parametrize(
    ("shape", "axis", "has_kernel"),
    [((2, 3, 4), -1, True), ((2, 3, 4), 1, True), ((2, 3, 4), 0, True), ((2, 3, 1), -1, False), ((2, 1, 1), 1, False)],
    ids=str,
)
@pytest.mark.parametrize("operator", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_which_axes_the_kernel_of_the_gradient_supports(
    operator: str, shape: tuple[int, ...], axis: int, *, has_kernel: bool
) -> None:
    """That of onnxruntime-training takes no axes of one element."""
    inputs = {"a": np.ones(shape), "scale": np.ones(shape[axis:])}
    made, _ = differentiate(model_of(operator, inputs, ["a", "scale"], axis=axis), ["a", "scale"], "loss")
    assert (f"{operator}Grad" in [node.op_type for node in made.graph.node]) == has_kernel


@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignore", [None, 1, -100])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none", None])
@pytest.mark.parametrize("behind", [(), (4,), (2, 3)], ids=str)
def test_cross_entropy(
    behind: tuple[int, ...], reduction: str | None, ignore: int | None, weighted: bool, kind: Any
) -> None:
    labels = RANDOM.integers(0, 3, (5, *behind)).astype(kind)
    if ignore is not None:
        labels.reshape(-1)[:2] = ignore
    inputs: dict[str, Any] = {"a": RANDOM.normal(size=(5, 3, *behind)), "xlabels": labels}
    if weighted:
        inputs["weights"] = RANDOM.uniform(0.5, 2, 3)
    attributes: dict[str, Any] = {} if reduction is None else {"reduction": reduction}
    if ignore is not None:
        attributes["ignore_index"] = ignore
    check("SoftmaxCrossEntropyLoss", inputs, ["a"], **attributes)


def test_cross_entropy_whose_log_probabilities_are_used() -> None:
    inputs = {"a": RANDOM.normal(size=(5, 3)), "xlabels": RANDOM.integers(0, 3, 5)}
    check("SoftmaxCrossEntropyLoss", inputs, ["a"], outputs=2, uses=(0, 1))
    check("SoftmaxCrossEntropyLoss", inputs, ["a"], outputs=2, uses=(1,))


@pytest.mark.parametrize("known", [True, False], ids=["known rank", "unknown rank"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("outputs", [("dx", "", ""), ("", "ds", ""), ("", "", "db"), ("dx", "ds", "db")], ids=" ".join)
def test_any_outputs_of_the_gradient_in_standard_operators(outputs: tuple[str, ...], axis: int, known: bool) -> None:
    shape = [2, 3, 4]
    random = np.random.default_rng(7)
    x, dy, scale = (random.standard_normal(size) for size in (shape, shape, shape[axis:]))
    axes = tuple(range(axis, 0))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-5)
    normal, scaled = (x - mean) * inverse, dy * scale
    along = (scaled * normal).mean(axes, keepdims=True)
    rows = tuple(range(3 + axis))
    expected = {
        "dx": (scaled - scaled.mean(axes, keepdims=True) - normal * along) * inverse,
        "ds": (dy * normal).sum(rows),
        "db": dy.sum(rows),
    }
    given = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inverse": inverse}
    node = helper.make_node("LayerNormalizationGrad", [*given], outputs, "node", domain="com.microsoft", axis=axis)
    described = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape if known or name == "scale" else None)
        for name, array in given.items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = compose(
        helper.make_model(helper.make_graph([node], "case", described, made), ir_version=10, opset_imports=opsets)
    )
    assert not any(each.domain for each in model.graph.node)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(None, {name: array.astype(np.float32) for name, array in given.items()})
    for name, found in zip(filter(None, outputs), results, strict=True):
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
