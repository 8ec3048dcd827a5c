"""The order of nodes, and which of them are needed: sorting a graph and taking out what nothing reads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace


def topological_order(nodes: Sequence[onnx.NodeProto], rank: Callable[[int, int], Any]) -> list[int]:
    """Places of the nodes, each behind those it reads from (Kahn 1962); those on a cycle, and behind one, are left out.

    Of the nodes that could be next, that of the lowest `rank(place, nth)` is: its place in `nodes`, and how many could
    be next before it.
    """
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    missing = [{makers[name] for name in walk.inputs(node) if name in makers} for node in nodes]
    followers: dict[int, list[int]] = {}
    for place, needed in enumerate(missing):
        for maker in needed:
            followers.setdefault(maker, []).append(place)
    ready: list[tuple[Any, int]] = []
    count = 0

    def enter(place: int) -> None:
        nonlocal count
        heapq.heappush(ready, (rank(place, count), place))
        count += 1

    for place, needed in enumerate(missing):
        if not needed:
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
    """Put each node behind those it reads from, otherwise in the order they stand."""
    order = topological_order(graph.node, lambda place, nth: place)
    if order != list(range(len(order))):
        replace(graph.node, [graph.node[place] for place in order])


def needed_by(nodes: Sequence[onnx.NodeProto], values: Iterable[str]) -> set[int]:
    """Places of the nodes that some of the values are computed from; the nodes must be sorted."""
    wanted, places = set(values), set()
    for place in range(len(nodes) - 1, -1, -1):
        if wanted.intersection(nodes[place].output):
            places.add(place)
            wanted |= walk.inputs(nodes[place])
    return places


def prune(graph: onnx.GraphProto) -> None:
    """Take out the nodes, initializers and descriptions that no output needs; inputs stay. Nodes must be sorted."""
    outputs = {value.name for value in graph.output}
    needed = needed_by(graph.node, outputs)
    kept = [node for place, node in enumerate(graph.node) if place in needed]
    wanted = outputs.union(*map(walk.inputs, kept))
    made = {name for node in kept for name in node.output}
    for field, items in (
        (graph.node, kept),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in wanted]),
        (graph.value_info, [value for value in graph.value_info if value.name in made]),
    ):
        if len(items) < len(field):
            replace(field, items)


def drop_unread_inputs(graph: onnx.GraphProto) -> None:
    """Take out inputs that nothing reads: ONNX Runtime would copy them to the host, and no CUDA graph can hold that."""
    read = {value.name for value in graph.output}.union(*map(walk.inputs, graph.node))
    replace(graph.input, [value for value in graph.input if value.name in read])
