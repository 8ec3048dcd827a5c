"""Lets elementwise groups recompute values from a product rather than read them from one another. Pure.

For Gelu after a product and a bias, the forward pass would store the derivative for the backward pass. Instead, the
backward pass reads the product, which is stored anyway. Called by step `configure` for half precision, on the fp32
graph
with our operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx

from ortflow.workflow.fusion.groups import INPUTS, Group, groups_of
from ortflow.workflow.fusion.half import is_large
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.operators.families import HALF_PRODUCTS
from ortflow.workflow.graph.rules.precision import HALVES

_PRODUCTS = {operator for operator, kinds in HALF_PRODUCTS.items() if kinds >= HALVES}
"""Products of matrices, and no convolutions."""
MOST = 16
"""Largest number of nodes to recompute in order to store one tensor less; Gelu's derivative has twelve."""


class _Chain(NamedTuple):
    """Nodes that compute `value`, in execution order, and the nodes of the one other group that reads it."""

    value: str
    nodes: Sequence[onnx.NodeProto]
    readers: Sequence[onnx.NodeProto]


def recomputed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which groups recompute what is cheap to compute from a product, vectors and scalars."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    descriptions = described(copy.graph)
    for number, chain in enumerate(list(_chains(copy))):
        names = {node.output[0]: f"{node.output[0]}.again.{number}" for node in chain.nodes}
        for node in chain.readers:
            node.input[:] = [names[name] if name == chain.value else name for name in node.input]
        for node in chain.nodes:
            again = onnx.NodeProto.FromString(node.SerializeToString())
            again.name, again.output[0] = f"{node.name}/again.{number}", names[node.output[0]]
            again.input[:] = [names.get(name, name) for name in node.input]
            copy.graph.node.append(again)
            description = copy.graph.value_info.add()
            description.CopyFrom(descriptions[node.output[0]])
            description.name = again.output[0]
    sort_nodes(copy.graph)
    prune(copy.graph)
    return copy


def _chains(model: onnx.ModelProto) -> Iterator[_Chain]:
    nodes, descriptions = list(model.graph.node), described(model.graph)
    outputs = {value.name for value in model.graph.output}
    makers = {name: node for node in nodes for name in node.output}
    groups = groups_of(model, element_types(model))
    of = {place: group for group in groups for place in group.members}
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in walk.inputs(node):
            readers.setdefault(name, []).append(place)
    for group in groups:
        for value in group.outputs:
            outside = [place for place in readers.get(value, ()) if place not in group.members]
            reading_groups = {id(of.get(place)): of.get(place) for place in outside}
            other = next(iter(reading_groups.values())) if len(reading_groups) == 1 else None
            if other is None or value in outputs or not is_large(dims_of(descriptions[value])):
                continue
            chain = _computing(value, nodes, group)
            read = {name: None for node in chain for name in node.input}
            read = {name: None for name in read if name not in {node.output[0] for node in chain}}
            if len(chain) > MOST or len({*read, *other.inputs}) > INPUTS:
                continue
            sources = [makers[name] for name in read if name in makers]
            small = all(
                len(dims_of(descriptions[name]) or ()) < 2
                for name in read
                if name not in makers and name in descriptions
            )
            # As much to read as the value itself, a tensor less to write, and a rounding less.
            if small and len(sources) == 1 and (sources[0].domain, sources[0].op_type) in _PRODUCTS:
                yield _Chain(value, chain, [nodes[place] for place in outside])


def _computing(value: str, nodes: Sequence[onnx.NodeProto], group: Group) -> list[onnx.NodeProto]:
    """The nodes of a group that a value is computed from."""
    values, chain = {value}, []
    for place in sorted(group.members, reverse=True):
        if nodes[place].output[0] in values:
            values.update(nodes[place].input)
            chain.append(nodes[place])
    return chain[::-1]
