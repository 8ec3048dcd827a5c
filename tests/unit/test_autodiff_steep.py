"""A ReLU drops the infinite gradient of a root, a logarithm or a quotient where its output is 0, as PyTorch's does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.autodiff.steep import steep_values
from ortflow.workflow.onnx_runtime import onnxruntime


def model_of(*steps: str) -> onnx.ModelProto:
    """`operator` or `operator number`, one after the other, of the parameter `p` [4]; then the sum."""
    nodes, numbers, value = [], [], "p"
    for place, step in enumerate(steps):
        operator, _, number = step.partition(" ")
        inputs = [value]
        if number:
            numbers.append(numpy_helper.from_array(np.float32(number), f"n{place}"))
            inputs.append(f"n{place}")
        nodes.append(helper.make_node(operator, inputs, [f"v{place}"], f"node{place}"))
        value = f"v{place}"
    nodes.append(helper.make_node("ReduceSum", [value], ["loss"], "sum", keepdims=0))
    graph = helper.make_graph(
        nodes,
        "steep",
        [helper.make_tensor_value_info("p", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        numbers,
    )
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    )


def gradient(model: onnx.ModelProto, p: list[float]) -> list[float]:
    made, _ = differentiate(model, ["p"], "loss")
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["p_grad"], {"p": np.array(p, np.float32)})
    return np.asarray(found).round(5).tolist()


STEEP = [
    ("Relu", "Sqrt"),
    ("Relu", "Pow 0.5"),
    ("Relu", "Mul 1", "Neg", "Neg", "Sqrt"),
    ("Relu", "Clip", "Sqrt"),
    ("Relu", "Pow 1.5", "Pow 0.3333333333"),
]


@pytest.mark.parametrize("steps", STEEP, ids=" ".join)
def test_the_gradient_is_0_where_relu_is(steps: tuple[str, ...]) -> None:
    assert gradient(model_of(*steps), [-1, 0, 4, 1]) == [0, 0, 0.25, 0.5]


@pytest.mark.parametrize("steps", [("Relu", "Log"), ("Relu", "Reciprocal")], ids=" ".join)
def test_likewise_of_a_logarithm_and_a_quotient(steps: tuple[str, ...]) -> None:
    found = gradient(model_of(*steps), [-1, 0, 2, 1])
    assert found[:2] == [0, 0]
    assert all(found[2:])


@pytest.mark.parametrize("steps", [("Relu", "Pow 2"), ("Relu", "Add 1", "Log"), ("Relu", "Exp", "Sin")], ids=" ".join)
def test_elsewhere_the_faster_product_stays(steps: tuple[str, ...]) -> None:
    """A Where takes several times as long."""
    model = model_of(*steps)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    assert "v0" not in steep_values(model.graph, tensors)
    made, _ = differentiate(model, ["p"], "loss")
    assert "Where" not in {node.op_type for node in made.graph.node}


def test_operators_of_other_domains_are_passed_over() -> None:
    """They are steep nowhere, and a root before them is."""
    model = model_of("Relu", "Sqrt", "Log", "Neg")
    model.graph.node[2].domain = "com.microsoft"
    assert steep_values(model.graph, {}) == {"v0"}
