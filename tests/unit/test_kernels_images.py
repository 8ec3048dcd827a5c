"""Convolutions and pooling in a training graph: their replacements, and that they compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from gradients import model_of
from kernels import LIBRARY, needs_kernels
from onnx import shape_inference

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime

pytestmark = needs_kernels
RANDOM = np.random.default_rng(0)


def tensor(*dims: int) -> np.ndarray:
    return RANDOM.standard_normal(dims).astype(np.float32)


X = tensor(2, 6, 11, 9)
CASES: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any], list[str]]] = {
    "max pool": (
        "MaxPool",
        {"x": X},
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
        ["MaxPoolGrad"],
    ),
    "max pool, ceil": (
        "MaxPool",
        {"x": X},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        ["MaxPoolGrad"],
    ),
    "max pool, same": ("MaxPool", {"x": X}, {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}, []),
    "average pool": ("AveragePool", {"x": X}, {"kernel_shape": [3, 3], "strides": [2, 2]}, ["ConvDataGrad"]),
    "depthwise": (
        "Conv",
        {"x": X, "w": tensor(12, 1, 3, 3), "b": tensor(12)},
        {"group": 6, "strides": [2, 1], "pads": [1, 0, 0, 2]},
        ["Conv", "ConvDataGrad", "ConvWeightGrad"],
    ),
    "whole": ("Conv", {"x": X, "w": tensor(5, 6, 3, 3)}, {"dilations": [2, 1]}, ["ConvDataGrad", "ConvWeightGrad"]),
    "deep": (
        "Conv",
        {"x": X, "w": tensor(5, 6, 4, 3), "b": tensor(5)},
        {"strides": [1, 2]},
        ["Conv", "ConvDataGrad", "ConvWeightGrad"],
    ),
    "batch norm": (
        "BatchNormalization",
        {"x": X, "s": tensor(6), "b": tensor(6), "mean": np.zeros(6), "variance": np.ones(6)},
        {"training_mode": 1, "momentum": 0.0, "outputs": 3},
        ["BatchNormalization", "BatchNormalizationGrad"],
    ),
    "transposed": (
        "ConvTranspose",
        {"x": X, "w": tensor(6, 2, 2, 2)},
        {"group": 6, "strides": [2, 2]},
        ["Conv", "ConvDataGrad", "ConvWeightGrad"],
    ),
    "transposed, whole": (
        "ConvTranspose",
        {"x": X, "w": tensor(6, 5, 2, 2)},
        {"strides": [2, 2]},
        ["ConvDataGrad", "ConvWeightGrad"],
    ),
    "transposed, longer": (
        "ConvTranspose",
        {"x": X, "w": tensor(6, 5, 3, 3), "b": tensor(5)},
        {"strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 2]},
        ["ConvDataGrad", "ConvWeightGrad"],
    ),
}


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(LIBRARY.path))
    options.log_severity_level = 3
    names = [f"{name}_grad" for name in feeds]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(names, dict(feeds)))


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_computed(name: str) -> None:
    operator, inputs, attributes, expected = CASES[name]
    feeds = {key: array for key, array in inputs.items() if key not in ("mean", "variance")}
    model = shape_inference.infer_shapes(model_of(operator, inputs, list(feeds), **attributes))
    made, _ = differentiate(model, list(feeds), "loss")
    faster = with_kernels(made)
    own = {node.op_type for node in faster.graph.node if node.domain == "ortflow"}
    assert own >= set(expected), own
    assert own.isdisjoint({"Conv", "ConvDataGrad", "ConvWeightGrad", "MaxPoolGrad"} - set(expected)), own
    for found, exact in zip(run(compose(faster), feeds), run(compose(made), feeds), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * max(1, np.abs(exact).max()))


def test_nothing_is_kept_of_where_the_maxima_were() -> None:
    model = shape_inference.infer_shapes(model_of("MaxPool", {"x": X}, ["x"], kernel_shape=[2, 2]))
    made, _ = differentiate(model, ["x"], "loss")
    (kept,) = (node for node in made.graph.node if node.op_type == "MaxPool")
    (pooling,) = (node for node in with_kernels(made).graph.node if node.op_type == "MaxPool")
    assert (len(kept.output), len(pooling.output)) == (2, 1)
