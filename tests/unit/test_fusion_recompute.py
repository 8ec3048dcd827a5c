"""Values that elementwise groups recompute from a product, and that the graph computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import run_graph
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.fusion.groups import groups_of
from ortflow.workflow.fusion.recompute import MOST, recomputed
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.memory.element_types import element_types

WIDTH = 128


def node(operator: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    """`names` end with the output."""
    return helper.make_node(operator, names[:-1], names[-1:], name=f"/{names[-1]}", **attributes)


def model_of(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], rows: int | str = "batch") -> onnx.ModelProto:
    wide = (rows, WIDTH)
    inputs = {"x": wide, "other": wide, "w": (WIDTH, WIDTH), "bias": (WIDTH,)}
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.float32(0.5), "half")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    shapes.infer(model, [])
    return model


def check(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Check that the graph computes the same; its groups after that: last output -> inputs."""
    random = np.random.default_rng(0)
    sizes: Mapping[str, tuple[int, ...]] = {
        "x": (3, WIDTH), "other": (3, WIDTH), "w": (WIDTH, WIDTH), "bias": (WIDTH,)
    }  # fmt: skip
    feeds = {name: random.normal(size=dims).astype("float32") / 8 for name, dims in sizes.items()}
    before = model.SerializeToString()
    found = recomputed(model)
    assert model.SerializeToString() == before
    expected, results = run_graph(model, feeds), run_graph(found, feeds)
    assert results.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(results[name], array)
    return {group.outputs[-1]: group.inputs for group in groups_of(found, element_types(found)) if group.outputs}


LAYER = [
    node("MatMul", "x", "w", "product"),
    node("Add", "product", "bias", "h"),
    node("Tanh", "h", "y"),
    node("MatMul", "y", "w", "z"),
]
SLOPE = [*LAYER, node("Mul", "y", "h", "slope")]
LAST = [node("Mul", "z", "slope", "g"), node("ReduceSum", "g", "sum", keepdims=0)]
KEPT = {"slope": ["product", "bias"], "g": ["z", "slope"]}


def test_what_one_group_would_store_for_another_is_computed_from_the_product() -> None:
    assert check(model_of([*SLOPE, *LAST], ["sum"])) == {"y": ["product", "bias"], "g": ["product", "bias", "z"]}


def test_a_gate_stores_nothing_for_its_gradients() -> None:
    nodes = [
        node("MatMul", "x", "w", "gate"),
        node("MatMul", "other", "w", "up"),
        node("Sigmoid", "gate", "part"),
        node("Mul", "gate", "part", "silu"),
        node("Mul", "silu", "up", "y"),
        node("MatMul", "y", "w", "z"),
        node("Mul", "z", "silu", "of_up"),
        node("Mul", "z", "part", "of_gate"),
    ]
    found = check(model_of(nodes, ["of_up", "of_gate"]))
    assert {name: sorted(inputs) for name, inputs in found.items()} == {
        "y": ["gate", "up"], "of_up": ["gate", "z"], "of_gate": ["gate", "z"]
    }  # fmt: skip


def test_what_other_nodes_read_is_stored() -> None:
    model = model_of([*SLOPE, *LAST, node("ReduceSum", "slope", "total", keepdims=0)], ["sum", "total"])
    assert check(model) == KEPT
    assert check(model_of([*SLOPE, *LAST], ["sum", "slope"])) == KEPT


def test_what_two_groups_read_is_stored() -> None:
    more = [node("MatMul", "g", "w", "late"), node("Add", "late", "slope", "last")]
    assert check(model_of([*SLOPE, *LAST, *more], ["sum", "last"])) == {**KEPT, "last": ["late", "slope"]}


def test_what_needs_a_second_large_value_is_stored() -> None:
    second = node("MatMul", "other", "w", "second")
    for name, more in (("other", []), ("second", [second])):
        model = model_of([*more, *LAYER, node("Mul", "y", name, "slope"), *LAST], ["sum"])
        assert check(model)["g"] == ["z", "slope"]


def test_what_is_computed_from_no_product_is_stored() -> None:
    nodes = [node("Elu", "x", "product"), *SLOPE[1:]]
    assert check(model_of([*nodes, *LAST], ["sum"])) == KEPT


def test_small_values_are_stored() -> None:
    assert check(model_of([*SLOPE, *LAST], ["sum"], rows=3)) == KEPT


@pytest.mark.parametrize("count", [MOST - 3, MOST - 2])
def test_what_takes_many_nodes_is_stored(count: int) -> None:
    names = ["early", *(f"step.{i}" for i in range(count - 1)), "slope"]
    nodes = [*LAYER, node("Mul", "y", "h", "early")]
    nodes += [node("Mul", one, "half", other) for one, other in pairwise(names)]
    again = check(model_of([*nodes, *LAST], ["sum"]))["g"] != ["z", "slope"]
    assert again == (3 + count <= MOST)
