"""Gradients of extremes in half precision: elements are compared with the extreme as they were when it was found."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from test_half import model_of, node, run

from ortflow.workflow.fusion.half import half
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.prepare import prepare

SIZE = 128
EXTREMES = {
    "ReduceMax": [node("ReduceMax", "bent", "rows", "y", keepdims=0)],
    "ReduceMin": [node("ReduceMin", "bent", "rows", "y", keepdims=0)],
    "Max": [node("Max", "bent", "other", "y")],
    "scatter max": [node("ScatterElements", "empty", "places", "bent", "y", axis=0, reduction="max")],
    "scatter min": [node("ScatterElements", "empty", "places", "bent", "y", axis=0, reduction="min")],
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_the_gradient_is_that_of_fp32(extreme: str) -> None:
    random = np.random.default_rng(0)
    nodes = [
        node("MatMul", "x", "w", "h"),
        node("Tanh", "h", "t"),
        node("Mul", "t", "scale", "bent"),
        *([node("Mul", "bent", "shift", "other")] if extreme == "Max" else []),
        *EXTREMES[extreme],
        node("MatMul", "bent", "w", "beside"),
        node("ReduceSum", "beside", "rest", keepdims=0),
        node("Mul", "y", "y", "squares"),
        node("ReduceSum", "squares", "sum", keepdims=0),
        node("Add", "rest", "sum", "loss"),
    ]
    sizes = {"x": [SIZE, SIZE], "w": [SIZE, SIZE], "scale": [SIZE], "shift": [SIZE]}
    model = model_of(nodes, sizes, ["loss"])
    model.graph.initializer.extend(
        [
            onnx.numpy_helper.from_array(np.array([1]), "rows"),
            onnx.numpy_helper.from_array(np.full((4, SIZE), -9 if "max" in extreme else 9, np.float32), "empty"),
            onnx.numpy_helper.from_array(np.repeat(np.arange(SIZE)[:, None] % 4, SIZE, 1), "places"),
        ]
    )
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    del model.graph.value_info[:]
    trained = ["w", "scale"]
    ready, _ = make_differentiable(prepare(model)[0], trained, "loss")
    single = compose(differentiate(ready, trained, "loss")[0])
    halved = half(single, TensorProto.FLOAT16, trained, {})
    feeds = {name: random.normal(size=dims).astype(np.float32) for name, dims in sizes.items()}
    feeds["w"] /= SIZE**0.5
    exact, found = run(single, feeds), run(halved, feeds)
    for name, array in exact.items():
        apart = np.linalg.norm(found[name] - array) / np.linalg.norm(array)
        assert apart < 5e-3, (name, apart)
