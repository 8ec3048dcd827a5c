"""Tables of which the ranks exchange the looked-up rows' gradients in place of the whole gradient. Pure.

The gradient of a look-up is the last that a backward pass computes, and its table is often the largest parameter: an
all-reduce of it has nothing beside which it could run. Only the rows of this step's indices differ from zero. A node
TableRows (indices, gradient of what was looked up) takes the place of TableGrad, and hands both over
(`ortflow.workflow.cuda.table_rows`); each rank adds up those of all ranks. Where the table is also the output layer,
that layer's part of the gradient is computed first, and summed while the backward pass continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.cuda.source import BYTES
from ortflow.workflow.fusion.buckets import LEAST, ROWS, gradient_of
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.rules.precision import HALVES
from ortflow.workflow.layout import FlatIndex

REPLACED = "TableGrad"
_PRODUCT = "Product"
"""The operator whose result may be fp32 where its factors are halves."""
_SAME = frozenset({"Reshape", "Identity", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators whose result has the elements of their first input."""


@dataclass(frozen=True)
class TableRows:
    """A look-up."""

    table: str
    """The parameter."""
    entries: int
    """The most indices of a micro-batch."""
    kind: int
    """Element type of the rows' gradients."""
    adds: bool
    """Whether they are added to a gradient of the table that something else computes."""


def with_rows(
    model: onnx.ModelProto, index: FlatIndex, elements: Mapping[str, int], ranks: int, least: int = LEAST
) -> tuple[onnx.ModelProto, list[TableRows]]:
    """A copy of a training graph with a TableRows in place of each TableGrad that is worth it, and what they exchange.

    Node i has the attribute `table` i. Those of one table are in the order in which they have to be added. If nothing
    else contributes to a gradient, the copy does not have it as an output.

    Parameters
    ----------
    index
        The parameters.
    elements
        The most elements of a graph input in a micro-batch, where that is known.
    ranks
        Their number.
    least
        Elements of the smallest table that is exchanged by rows.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    sort_nodes(graph)
    types, lookups = element_types(copy), list[TableRows]()
    for entry in index:
        if entry.offset >= index.trained or len(entry.tensor.shape) != 2 or entry.tensor.count < least:
            continue
        chain, addend = _chain(graph, gradient_of(entry.name))
        rows = [
            TableRows(entry.name, elements.get(_source(graph, node.input[0]), 0), types[node.input[1]], adds)
            for node, adds in zip(chain, [bool(addend), *[True] * len(chain)], strict=False)
        ]
        height, width = entry.tensor.shape
        # An all-reduce sends and receives each fp32 twice.
        sizes = [lookup.entries * width * BYTES[lookup.kind] for lookup in rows]
        if not chain or not all(lookup.entries for lookup in rows) or ranks * sum(sizes) > height * width * 4:
            continue
        for node, lookup in zip(chain, rows, strict=True):
            _exchange(graph, node, len(lookups))
            lookups.append(lookup)
        _name_gradient(graph, gradient_of(entry.name), addend, types.get(addend, 0))
    return copy, lookups


def _chain(graph: onnx.GraphProto, gradient: str) -> tuple[list[onnx.NodeProto], str]:
    """The TableGrads that add up to a gradient, in this order, and the value that the first adds to, empty if there is
    none. No TableGrads if another node or an output reads one of these values, or if that value is an input."""
    makers = walk.producers(graph)
    readers = [name for node in walk.nodes(graph.node) for name in node.input]
    outputs = {value.name for value in graph.output}
    chain: list[onnx.NodeProto] = []
    value = gradient
    while (node := makers.get(value)) is not None and node.op_type == REPLACED and node.domain == CUDA_DOMAIN:
        chain.insert(0, node)
        value = node.input[2] if len(node.input) > 2 else ""
        if readers.count(node.output[0]) != (0 if len(chain) == 1 else 1):
            return [], ""
    if value and (value not in makers or value in outputs or readers.count(value) != 1):
        return [], ""
    return chain, value if chain else ""


def _source(graph: onnx.GraphProto, value: str) -> str:
    """The value of whose elements this one is made, in their order."""
    makers = walk.producers(graph)
    while (node := makers.get(value)) is not None and node.op_type in _SAME:
        value = node.input[0]
    return value


def _exchange(graph: onnx.GraphProto, node: onnx.NodeProto, number: int) -> None:
    """Turn a TableGrad into the TableRows of this number."""
    token = f"ortflow.rows.{number}"
    replacement = helper.make_node(ROWS, node.input[:2], [token], node.name, domain=CUDA_DOMAIN, table=number)
    node.CopyFrom(replacement)
    graph.value_info.append(helper.make_tensor_value_info(token, TensorProto.FLOAT, [1]))


def _name_gradient(graph: onnx.GraphProto, gradient: str, addend: str, kind: int) -> None:
    """Let what the rows are added to be the table's gradient, in fp32; without it the graph has none."""
    replace(graph.output, [value for value in graph.output if value.name != gradient or addend])
    stale, nodes = {gradient}, list[onnx.NodeProto]()
    for node in graph.node:
        nodes.append(node)
        if not addend or addend not in node.output:
            continue
        # With a bias or a residual a Product writes halves: cuBLASLt takes both in the type of the result.
        if kind in HALVES and not (node.op_type == _PRODUCT and len(node.input) == 2):
            nodes.append(helper.make_node("Cast", [addend], [gradient], to=int(TensorProto.FLOAT)))
        else:
            stale.add(addend)
            node.output[:] = [gradient if name == addend else name for name in node.output]
    replace(graph.node, nodes)
    replace(graph.value_info, [value for value in graph.value_info if value.name not in stale])
