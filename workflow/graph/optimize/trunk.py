"""Divides a forward graph at the places that a single activation crosses: its trunk. Pure.

In a transformer these are the places between attention and MLP, where only the residual stream crosses; in a residual
network, those between blocks. Values that many layers read, such as an encoder's output, do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.ir import walk

READERS, SPANS = 2, (0.3, 0.15)
"""A shared value has this many readers at least, and reaches over such a part of the nodes."""


@dataclass(frozen=True)
class Segment:
    """Nodes between two neighbouring places of the trunk."""

    places: tuple[int, ...]
    """Positions in the graph."""
    kind: int
    """Equal for isomorphic segments."""
    end: str
    """The activation that crosses behind it."""


def trunks_of(
    graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto], trained: Collection[str], loss: str
) -> list[list[Segment]]:
    """The segments of a sorted forward graph in training mode, without shared values and with them.

    Only nodes between the parameters and the loss that depend on the batch are in a segment. What lies behind the last
    place is left out.
    """
    path = gradient_path(graph, types, trained, [loss])
    data_inputs = {value.name for value in graph.input if value.name not in trained}
    flow, values = _flow(graph, path.nodes, path.values, data_inputs)
    reads: dict[str, list[int]] = {}
    for number, place in enumerate(flow):
        for name in walk.inputs(graph.node[place]) & values:
            reads.setdefault(name, []).append(number)
    step_of = {name: number for number, place in enumerate(flow) for name in graph.node[place].output}
    long = {
        part: {n for n, at in reads.items() if len(at) >= READERS and at[-1] - step_of[n] > part * len(flow)}
        for part in SPANS
    }
    shared = [set[str](), *(names for names in long.values() if names)]
    return [_segments(graph, flow, values, reads, names) for names in shared]


def _flow(
    graph: onnx.GraphProto, places: Collection[int], differentiated: Collection[str], batch: Collection[str]
) -> tuple[list[int], set[str]]:
    """Nodes that compute activations, in order, and the activations: they depend on the batch, not on its shape."""
    dependent, flow, values = set(batch), list[int](), set[str]()
    for place, node in enumerate(graph.node):
        if node.op_type in ("Shape", "Size") or not walk.inputs(node) & dependent:
            continue
        dependent.update(node.output)
        if place in places:
            flow.append(place)
            values |= set(node.output) & set(differentiated)
    return flow, values


def _segments(
    graph: onnx.GraphProto,
    flow: Sequence[int],
    values: Collection[str],
    reads: Mapping[str, Sequence[int]],
    shared: Collection[str],
) -> list[Segment]:
    segments: list[Segment] = []
    kinds: dict[tuple[int, ...], int] = {}
    crossing: set[str] = set()
    start, before = 0, ""
    for number, place in enumerate(flow):
        node = graph.node[place]
        crossing = {name for name in crossing if reads[name][-1] > number}
        crossing.update(n for n in node.output if n in values and n not in shared and reads.get(n, [0])[-1] > number)
        if len(crossing) != 1:
            continue
        (end,) = crossing
        if end not in node.output:
            # What this node makes is shared or read by none: the place before is the same.
            continue
        places = _computing(graph, flow[start : number + 1], end, shared)
        form = _form([graph.node[at] for at in places], before, values, shared)
        segments.append(Segment(places, kinds.setdefault(form, len(kinds)), end))
        start, before = number + 1, end
    return segments


def _computing(graph: onnx.GraphProto, places: Sequence[int], end: str, shared: Collection[str]) -> tuple[int, ...]:
    """The nodes that a value is computed from; not those that only compute shared values, as T5's first layer does."""
    needs, places_read = {end}, []
    for place in reversed(places):
        node = graph.node[place]
        if not needs.isdisjoint(node.output) and not any(name in shared for name in node.output):
            needs |= walk.inputs(node)
            places_read.append(place)
    return tuple(reversed(places_read))


def _form(
    nodes: Sequence[onnx.NodeProto], entry: str, values: Collection[str], shared: Collection[str]
) -> tuple[int, ...]:
    """Hashes of the nodes by operator and by the nodes that they read, in an order that does not depend on the file."""
    hash_of: dict[str, int] = {entry: 1}
    hashes = []
    for node in nodes:
        read = tuple(hash_of.get(n, 2) if n in values and n not in shared else 3 for n in node.input)
        node_hash = hash((node.domain, node.op_type, read))
        hash_of.update((name, hash((node_hash, slot))) for slot, name in enumerate(node.output) if name)
        hashes.append(node_hash)
    return tuple(sorted(hashes))
