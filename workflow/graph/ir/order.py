"""Topological sorting of a graph, and removal of unused nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace


def topological_order(nodes: Sequence[onnx.NodeProto], rank: Callable[[int, int], Any]) -> list[int]:
    """Positions of the nodes in topological order (Kahn 1962); nodes on a cycle, or after one, are left out.

    Of the nodes that are ready, the one with the lowest `rank(place, nth)` is next: `place` is its position in `nodes`,
    `nth` the number of nodes that became ready before it.
    """
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    missing = [{makers[name] for name in walk.inputs(node) if name in makers} for node in nodes]
    followers: dict[int, list[int]] = {}
    for place, makers_left in enumerate(missing):
        for maker in makers_left:
            followers.setdefault(maker, []).append(place)
    ready: list[tuple[Any, int]] = []
    count = 0

    def enter(place: int) -> None:
        nonlocal count
        heapq.heappush(ready, (rank(place, count), place))
        count += 1

    for place, makers_left in enumerate(missing):
        if not makers_left:
            enter(place)
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)[1]
        order.append(place)
        for follower in followers.get(place, ()):
            missing[follower].discard(place)
            if not missing[follower]:
                enter(follower)
    return order


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically, otherwise in their present order. Raises OrtflowError if there is a cycle."""
    if is_sorted(graph.node):
        return
    order = topological_order(graph.node, lambda place, nth: place)
    if len(order) < len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))).difference(order))]
        raise OrtflowError(f"{walk.called(stuck)} waits for a value that is computed from its own")
    replace(graph.node, [graph.node[place] for place in order])


def is_sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether each node stands behind those that make its inputs."""
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if not later.isdisjoint(walk.inputs(node)):
            return False
        later.difference_update(node.output)
    return True


def needed_by(nodes: Sequence[onnx.NodeProto], values: Iterable[str]) -> set[int]:
    """Positions of the nodes that some of the values are computed from. Nodes must be sorted."""
    return _needed(nodes, values)[0]


def _needed(nodes: Sequence[onnx.NodeProto], values: Iterable[str]) -> tuple[set[int], set[str]]:
    """The positions of `needed_by`, and the values with all that these nodes read."""
    names_read, places = set(values), set()
    for place, node in reversed([*enumerate(nodes)]):
        if not names_read.isdisjoint(node.output):
            places.add(place)
            names_read |= walk.inputs(node)
    return places, names_read


def prune(graph: onnx.GraphProto) -> None:
    """Remove the nodes, initializers and descriptions that no output needs; inputs stay. Nodes must be sorted."""
    needed_places, names_read = _needed(graph.node, [value.name for value in graph.output])
    nodes = [node for place, node in enumerate(graph.node) if place in needed_places]
    produced = {name for node in nodes for name in node.output} if graph.value_info else set()
    for field, items in (
        (graph.node, nodes),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in names_read]),
        (graph.value_info, [value for value in graph.value_info if value.name in produced]),
    ):
        if len(items) < len(field):
            replace(field, items)


def drop_unread_inputs(graph: onnx.GraphProto) -> None:
    """Remove inputs that nothing reads."""
    # ONNX Runtime would copy them to the host, which a CUDA graph cannot contain.
    read = {value.name for value in graph.output}.union(*map(walk.inputs, graph.node))
    replace(graph.input, [value for value in graph.input if value.name in read])
