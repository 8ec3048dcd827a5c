"""A choice between a value and itself costs nothing in a training graph."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.stops import stop
from ortflow.workflow.onnx_runtime import onnxruntime

MASK = np.array([[True], [False], [True]])
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def model_of(mask: np.ndarray, other: str = "stopped") -> onnx.ModelProto:
    """The sum of the squares of where(mask, other, x); `stopped` is x without its gradient. Recomputation reads
    where(gate, x, x), which no runtime sees through.
    """
    nodes = [
        stop("x", "stopped", "stop"),
        helper.make_node("Neg", ["x"], ["negative"], "negative"),
        helper.make_node("Where", ["mask", other, "x"], ["chosen"], "choice"),
        helper.make_node("Mul", ["chosen", "chosen"], ["square"], "square"),
        helper.make_node("ReduceSum", ["square"], ["loss"], "loss", keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, mask.shape),
    ]
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "choice", inputs, [loss])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def test_only_the_gradient_is_chosen() -> None:
    made, _ = differentiate(model_of(MASK), ["x"], "loss")
    assert "choice" not in [node.name for node in made.graph.node]
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (gradient,) = session.run(["x_grad"], {"x": X, "mask": MASK})
    np.testing.assert_array_equal(gradient, np.where(MASK, 0, 2 * X))


def test_other_choices_stay() -> None:
    for model in (model_of(MASK, "negative"), model_of(MASK, "x"), model_of(np.ones((2, 1, 1), bool))):
        made, _ = differentiate(model, ["x"], "loss")
        assert "choice" in [node.name for node in made.graph.node]
