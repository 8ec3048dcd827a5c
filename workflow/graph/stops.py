"""The mark of a value through which no gradient passes: an Identity node whose metadata says so.

`ortflow.export` writes it for `detach()` and `no_grad()`; `path` and `differentiate` honour it. For every other reader
of a model it is an Identity.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.edit import replace

KEY, VALUE = "ortflow.gradient", "stopped"
"""Metadata property of the node."""


def stops_gradient(node: onnx.NodeProto) -> bool:
    """Whether the node is the mark."""
    return node.op_type == "Identity" and any(p.key == KEY and p.value == VALUE for p in node.metadata_props)


def stop(value: str, output: str, name: str) -> onnx.NodeProto:
    """A node that makes `output`: `value` without its gradient."""
    node = helper.make_node("Identity", [value], [output], name)
    node.metadata_props.add(key=KEY, value=VALUE)
    return node


def stopped_values(graph: onnx.GraphProto) -> list[str]:
    """What the marks of a graph make, in order."""
    return [node.output[0] for node in graph.node if stops_gradient(node)]


def hide_stops(graph: onnx.GraphProto) -> list[str]:
    """Put casts to int64 and back in place of the marks, and return what they make.

    ONNX Runtime's gradient builder knows no mark, and drops metadata; whole numbers carry no gradient. The result is to
    be differentiated only, not to be run.
    """
    hidden = stopped_values(graph)
    nodes = []
    for node in graph.node:
        if stops_gradient(node):
            output = node.output[0]
            whole = f"{output}.whole"
            nodes.append(helper.make_node("Cast", node.input, [whole], f"{node.name}/whole", to=TensorProto.INT64))
            nodes.append(helper.make_node("Cast", [whole], [output], node.name, to=TensorProto.FLOAT))
        else:
            nodes.append(node)
    if hidden:
        replace(graph.node, nodes)
    return hidden


def show_stops(graph: onnx.GraphProto, hidden: Collection[str]) -> None:
    """Put the marks back in place of what `hide_stops` put there."""
    makers = {name: node for node in graph.node for name in node.output}
    casts = {name: makers[makers[name].input[0]] for name in hidden}
    gone = {name for cast in casts.values() for name in cast.output}
    nodes = []
    for node in graph.node:
        if node.output[0] in casts:
            nodes.append(stop(casts[node.output[0]].input[0], node.output[0], node.name))
        elif node.output[0] not in gone:
            nodes.append(node)
    if hidden:
        replace(graph.node, nodes)
