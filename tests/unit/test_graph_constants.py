"""On GPUs: masks that are computed from constants, look-ups of rows, and Concats of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from emulated_cuda import needs_emulation
from graph_build_models import run_graph, value
from onnx import TensorProto, helper, numpy_helper
from operators_on_gpu import BF16, FLOAT, FP16, JOINED, KINDS, check_join, stored
from test_cuda_kernels import Emulated

from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.joins import MOST, put_joins
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.optimize.on_cuda import on_cuda


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, Sequence[Any]], outputs: Sequence[str], **tensors: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [value(name, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    shapes.infer(model, [])
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


MASK = [
    helper.make_node("ConstantOfShape", ["sizes"], ["empty"]),
    helper.make_node("ScatterND", ["empty", "rows", "ones"], ["first"]),
    helper.make_node("ScatterND", ["first", "row", "twos"], ["regions"]),
    helper.make_node("Unsqueeze", ["regions", "axis"], ["column"]),
    helper.make_node("Sub", ["column", "regions"], ["apart"]),
    helper.make_node("Equal", ["apart", "zero"], ["same"]),
    helper.make_node("Where", ["same", "zero", "far"], ["mask"]),
]
TENSORS: dict[str, Any] = {
    "sizes": np.array([3, 4]), "rows": np.array([[0], [1]]), "ones": np.ones((2, 4), np.float32),
    "row": np.array([[2]]), "twos": np.full((1, 4), 2, np.float32), "axis": np.array([1]),
    "zero": np.float32(0), "far": np.float32(-100),
}  # fmt: skip


def test_a_mask_that_is_filled_by_constants_is_one() -> None:
    nodes = [*MASK, helper.make_node("Add", ["x", "mask"], ["y"]), helper.make_node("Tanh", ["y"], ["z"])]
    model = model_of(nodes, {"x": [3, 3, 4]}, ["z"], **TENSORS)
    placed = on_cuda(model)
    assert operators(placed) == ["Add", "Tanh"]
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 3, 4)).astype("float32")}
    np.testing.assert_array_equal(run_graph(placed, feeds)["z"], run_graph(model, feeds)["z"])
    # The mask is an operand of the fused kernel, although no value describes it.
    fused, _ = fuse(placed)
    assert operators(fused) == ["Fused"]
    assert "mask" in fused.graph.node[0].input


def test_what_depends_on_an_input_stays() -> None:
    nodes = [helper.make_node("ScatterND", ["x", "rows", "ones"], ["y"])]
    model = model_of(nodes, {"x": [3, 4]}, ["y"], rows=TENSORS["rows"], ones=TENSORS["ones"])
    assert operators(on_cuda(model)) == ["ScatterND"]


def test_without_a_filled_mask_nothing_is_stored() -> None:
    nodes = [helper.make_node("ConstantOfShape", ["sizes"], ["empty"]), helper.make_node("Add", ["x", "empty"], ["y"])]
    model = model_of(nodes, {"x": [3, 4]}, ["y"], sizes=TENSORS["sizes"])
    assert operators(on_cuda(model)) == ["ConstantOfShape", "Add"]


def test_a_look_up_of_rows_is_a_gather() -> None:
    places = np.array([[2], [-1], [0]])
    model = model_of([helper.make_node("GatherND", ["x", "places"], ["y"])], {"x": [3, 4]}, ["y"], places=places)
    placed = on_cuda(model)
    assert "GatherND" not in operators(placed)
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    np.testing.assert_array_equal(run_graph(placed, feeds)["y"], feeds["x"][[2, -1, 0]])
    two = model_of([helper.make_node("GatherND", ["x", "places"], ["y"])], {"x": [3, 4]}, ["y"], places=[[0, 1]])
    assert operators(on_cuda(two)) == ["GatherND"]


def concat(*sizes: int, axis: int = 1) -> onnx.ModelProto:
    names = [f"x{place}" for place in range(len(sizes))]
    inputs = {name: [2, size, 3] for name, size in zip(names, sizes, strict=True)}
    return model_of([helper.make_node("Concat", names, ["y"], axis=axis)], inputs, ["y"])


def test_values_of_different_sizes_are_joined_by_our_operator() -> None:
    joined = put_joins(concat(4, 5))
    (node,) = joined.graph.node
    assert (node.op_type, node.domain, list(node.input)) == ("Join", CUDA_DOMAIN, ["x0", "x1"])
    assert operators(put_joins(concat(4, 4))) == ["Concat"]
    assert operators(put_joins(concat(*range(1, MOST + 2)))) == ["Concat"]
    whole = [
        helper.make_node("Concat", ["one", "three"], ["all"], axis=0),
        helper.make_node("Reshape", ["x", "all"], ["y"]),
    ]
    assert operators(put_joins(model_of(whole, {"x": [6]}, ["y"], one=[1], three=[2, 3, 1]))) == ["Concat", "Reshape"]


@needs_emulation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sizes", "axis"), JOINED, ids=str)
def test_joined_values_lie_side_by_side(sizes: list[tuple[int, ...]], axis: int, kind: int) -> None:
    check_join(Emulated(), sizes, axis, kind)


def test_values_that_cannot_be_joined_are_refused() -> None:
    for second in (stored(np.zeros((2, 4)), FP16), stored(np.zeros((3, 4)), BF16)):
        with pytest.raises(Exception, match="cannot be joined along axis 1"):
            Emulated()("Join", {"axis": 1}, [stored(np.zeros((2, 4)), BF16), second], [FLOAT])
