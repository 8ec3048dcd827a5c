"""Outputs of ORTModule's graphs for GPUs that are stored in half precision."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")

from ortflow.torch.gpu_graphs import in_half


def graph(*outputs: str) -> onnx.GraphProto:
    """x -> h, bf16 -> y, fp32 -> z."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    kinds = {"h": TensorProto.BFLOAT16, "y": TensorProto.FLOAT, "z": TensorProto.FLOAT}
    made = helper.make_graph(
        nodes, "graph", [info("x", TensorProto.FLOAT, [2])], [info(n, kinds[n], [2]) for n in outputs]
    )
    made.value_info.extend(info(name, kind, [2]) for name, kind in kinds.items() if name not in outputs)
    return made


def names(found: onnx.GraphProto) -> list[str]:
    return [value.name for value in found.output]


def test_a_conversion_is_left_out() -> None:
    found = graph("y")
    assert in_half(found, ["y"]) == {"y": "h"}
    assert names(found) == ["h"]
    assert found.output[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
    assert [node.output[0] for node in found.node] == ["h"]


def test_a_value_that_is_an_output_already_is_one_once() -> None:
    found = graph("y", "h")
    assert in_half(found, ["y"]) == {"y": "h"}
    assert names(found) == ["h"]


def test_a_conversion_that_another_node_reads_stays_inside() -> None:
    found = graph("y", "z")
    assert in_half(found, ["y", "z"]) == {"y": "h"}
    assert names(found) == ["z", "h"]
    assert len(found.node) == 3


def test_outputs_in_fp32_stay() -> None:
    found = graph("y", "z")
    assert in_half(found, ["z"]) == {}
    assert names(found) == ["y", "z"]
