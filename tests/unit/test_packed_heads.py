"""Queries, keys and values from a transposed projection: the same values from the projection's parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.attention.packed_heads import unpack_heads
from ortflow.workflow.onnx_runtime import onnxruntime

TOKENS, HEADS, SIZE = 5, 2, 4
OUTPUTS = ["q", "k", "v"]


def model(
    *,
    perm: tuple[int, ...] = (2, 0, 3, 1, 4),
    whole: bool = False,
    ends: tuple[int, ...] = (1, 2, 3),
    tokens: int = TOKENS,
) -> onnx.ModelProto:
    constants = {"shape": [-1, tokens, 3, HEADS, SIZE], "zero": [0], "one": [1], "two": [2]}
    constants |= {f"end.{place}": [end] for place, end in enumerate(ends)}
    node = helper.make_node
    nodes = [node("Reshape", ["x", "shape"], ["five"]), node("Transpose", ["five"], ["turned"], perm=perm)]
    for place, name in enumerate(OUTPUTS):
        start = ("zero", "one", "two")[place]
        nodes.append(node("Slice", ["turned", start, f"end.{place}", "zero"], [f"{name}.part"]))
        nodes.append(node("Squeeze", [f"{name}.part", "zero"], [name]))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info("x", TensorProto.FLOAT, ["batch", TOKENS, 3 * HEADS * SIZE])],
        [info(name, TensorProto.FLOAT, None) for name in (*OUTPUTS, *(["turned"] if whole else []))],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def results(of: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(of.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((3, TOKENS, 3 * HEADS * SIZE)).astype(np.float32)
    found: list[np.ndarray] = session.run(OUTPUTS, {"x": x})
    return found


def test_the_projection_is_divided() -> None:
    before = model()
    after = unpack_heads(before)
    assert sorted(node.op_type for node in after.graph.node) == sorted(["Split", *["Reshape", "Transpose"] * 3])
    for expected, actual in zip(results(before), results(after), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("other", [{"perm": (2, 0, 1, 3, 4)}, {"whole": True}, {"ends": (1, 3, 3)}, {"tokens": 1}])
def test_other_graphs_stay(other: dict[str, Any]) -> None:
    before = model(**other)
    assert unpack_heads(before) == before
