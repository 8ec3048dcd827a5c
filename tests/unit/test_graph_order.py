"""Sorting nodes: after the values that they read, and by rank among those that could be next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes, topological_order

# d reads c and b, c reads a; b reads no node's output.
NODES = [
    helper.make_node("Add", ["c", "b"], ["d"]),
    helper.make_node("Neg", ["x"], ["b"]),
    helper.make_node("Neg", ["x"], ["a"]),
    helper.make_node("Neg", ["a"], ["c"]),
]


def made(nodes: Sequence[onnx.NodeProto], rank: Callable[[int, int], int]) -> str:
    return "".join(nodes[place].output[0] for place in topological_order(nodes, rank))


def test_of_those_that_could_be_next_the_lowest_rank_is() -> None:
    assert made(NODES, lambda place, nth: place) == "bacd"
    assert made(NODES, lambda place, nth: -place) == "acbd"
    turned = NODES[:0:-1]
    assert made(turned, lambda place, nth: place) == "acb"
    assert made(turned, lambda place, nth: nth) == "abc"


def test_a_cycle_and_what_is_behind_it_are_left_out() -> None:
    nodes = [*NODES, helper.make_node("Add", ["f", "a"], ["e"]), helper.make_node("Neg", ["e"], ["f"])]
    assert topological_order(nodes, lambda place, nth: place) == [1, 2, 3, 0]


def test_what_no_output_needs_is_taken_out() -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(NODES, "g", [value("x", TensorProto.FLOAT, [])], [value("c", TensorProto.FLOAT, [])])
    graph.value_info.append(value("b", TensorProto.FLOAT, []))
    sort_nodes(graph)
    assert [node.output[0] for node in graph.node] == ["b", "a", "c", "d"]
    prune(graph)
    assert ([node.output[0] for node in graph.node], list(graph.value_info)) == (["a", "c"], [])
    onnx.checker.check_graph(graph, onnx.checker.DEFAULT_CONTEXT)


def test_a_pass_without_a_change_copies_nothing() -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(NODES[1:], "g", [value("x", TensorProto.FLOAT, [])], [value("c", TensorProto.FLOAT, [])])
    before = [*graph.node]
    replace(graph.node, before)
    sort_nodes(graph)
    assert all(node is same for node, same in zip(graph.node, before, strict=True))
    replace(graph.node, before[1:])
    assert [node.output[0] for node in graph.node] == ["a", "c"]
    replace(graph.node, [graph.node[1], graph.node[0]])
    assert [node.output[0] for node in graph.node] == ["c", "a"]
