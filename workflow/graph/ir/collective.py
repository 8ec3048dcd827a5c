"""Nodes that communicate: the operator `Collective` of domain `ortflow`, which all parts of a model run together.

A channel is the number under which a rank knows the ranks that take part; `parts` is how many they are. The operator's
kernel, `kernels/collective.c`, calls Python (`sessions.collectives`). Every rank must run the same collectives in the
same order: `in_order` writes that order into a finished graph.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, import_domain, replace
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.writer import Writer

OPERATOR = "Collective"
SYNCED = "ortflow.replicas"
"""Metadata key of a BatchNormalization whose given statistics are those of the batch over several ranks: the channel
of their collectives, and their number."""
_TOKEN = "ortflow.collective"


class Kind(IntEnum):
    """What a node computes, and its gradient."""

    ALL_REDUCE = 0
    """The sum over the parts. Its gradient, equal on all parts, passes unchanged: g of Shoeybi et al. 2019."""
    ALL_REDUCE_MAX = 1
    """The largest over the parts; no gradient passes."""
    ALL_GATHER = 2
    """The parts' rows (first axis) in their order. Its gradient is reduced and scattered."""
    REDUCE_SCATTER = 3
    """This part's rows of the sum. Its gradient is gathered."""
    COPY = 4
    """The value itself; its gradient is summed over the parts: f of Shoeybi et al. 2019. `finish` takes it out."""


_OF_LAYERS = frozenset([Kind.ALL_REDUCE, Kind.REDUCE_SCATTER])
"""Sums over the parts of layers."""


def collective(
    write: Writer, kind: Kind, value: str, channel: int, parts: int, output: str | None = None, name: str = ""
) -> str:
    """Add a node; the name of what it makes.

    Parameters
    ----------
    value
        fp32, fp64 or int64; equal in type and shape on all parts.
    channel
        Under which `sessions.collectives` knows the communicator.
    parts
        Its number of ranks.
    """
    attributes = {"kind": int(kind), "channel": channel, "parts": parts}
    output = output or write.fresh(name or kind.name.lower())
    return write(OPERATOR, value, output=output, domain=CPU_DOMAIN, **attributes)


def is_collective(node: onnx.NodeProto) -> bool:
    """Whether the node is one."""
    return bool(node.op_type == OPERATOR and node.domain in (CPU_DOMAIN, CUDA_DOMAIN))


def kind_of(node: onnx.NodeProto) -> Kind:
    """What a collective computes."""
    return Kind(_flags(node)["kind"])


def channel_of(node: onnx.NodeProto) -> tuple[int, int]:
    """A collective's channel and its number of parts."""
    flags = _flags(node)
    return int(flags["channel"]), int(flags["parts"])


def _flags(node: onnx.NodeProto) -> dict[str, Any]:
    return attributes_of(node)


def has_collectives(model: onnx.ModelProto) -> bool:
    """Whether a session of the model needs communicators."""
    return any(map(is_collective, model.graph.node))


def finish(model: onnx.ModelProto) -> None:
    """Take out what only the gradient needed, and put the collectives in the order in which they stand, in place.

    The last change to a graph: the nodes must be sorted, and keep their order from then on.
    """
    drop_copies(model.graph)
    in_order(model.graph)
    _draw_in_order(model.graph)
    import_domain(model, CPU_DOMAIN)


def drop_copies(graph: onnx.GraphProto) -> None:
    """Take the nodes of kind COPY out of a differentiated graph, in place."""
    outputs = {value.name for value in graph.output}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        if not is_collective(node) or kind_of(node) != Kind.COPY:
            nodes.append(node)
        elif node.output[0] in outputs:
            nodes.append(helper.make_node("Identity", node.input, node.output, node.name))
        else:
            names[node.output[0]] = node.input[0]
    if len(nodes) < len(graph.node) or any(node.op_type == "Identity" for node in nodes):
        replace(graph.node, nodes)


def in_order(graph: onnx.GraphProto) -> None:
    """Let each collective read a token of the one before it, in place.

    So no optimisation can reorder, merge or drop one, and every rank runs them alike. What was in order before stays.
    """
    token = ""
    described = []
    for number, node in enumerate(filter(is_collective, graph.node), 1):
        del node.input[1:], node.output[1:]
        if token:
            node.input.append(token)
        token = f"{_TOKEN}.{number}"
        node.output.append(token)
        described.append(helper.make_tensor_value_info(token, TensorProto.FLOAT, []))
    descriptions = [value for value in graph.value_info if not value.name.startswith(f"{_TOKEN}.")]
    replace(graph.value_info, [*descriptions, *described])


def _draw_in_order(graph: onnx.GraphProto) -> None:
    """Let each Dropout with a mask wait for the one before it, in place.

    ONNX Runtime draws the masks of a run from one sequence of random numbers: all parts of a layer have to draw them
    alike. What only gathers weights has no parts of layers.
    """
    if not any(is_collective(node) and kind_of(node) in _OF_LAYERS for node in graph.node):
        return
    edit, before = Editor(graph), ""
    for node in [node for node in graph.node if node.op_type == "Dropout" and node.domain == ""]:
        if len(node.input) < 3 or not node.input[1]:
            continue
        if before:
            first = edit("Slice", edit("Reshape", before, edit.ints(-1)), edit.ints(0), edit.ints(1))
            # Either way it is the ratio: what counts is that the node waits for the mask.
            ratio = edit("Where", first, node.input[1], node.input[1])
            node.input[1] = edit("Reshape", ratio, edit.constant([], "int64"))
        if len(node.output) < 2:
            node.output.append("")
        node.output[1] = before = node.output[1] or edit.fresh("mask")
    sort_nodes(graph)
