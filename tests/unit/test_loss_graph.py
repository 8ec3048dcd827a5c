"""Parts of a training graph: types and shapes of their values."""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.objective.loss_graph import with_outputs


def test_an_output_of_our_own_operators_keeps_its_type() -> None:
    """Shape inference does not support them, so only the value's description has it."""
    node = helper.make_node(
        "LayerNormalization", ["x", "scale", "bias"], ["y", "mean", "deviation"], domain=CUDA_DOMAIN
    )
    last = helper.make_node("Identity", ["y"], ["z"])
    floats = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "mean", "deviation")}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "scale", "bias")]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node, last], "train", inputs, outputs, value_info=list(floats.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(CUDA_DOMAIN, 1)])

    part = ModelProto.FromString(with_outputs(model.SerializeToString(), ["y", "z"]))
    assert [value.name for value in part.graph.output] == ["y", "z"]
    types = element_types(part)
    assert [types[name] for name in ("y", "mean", "deviation", "z")] == [TensorProto.FLOAT] * 4
