"""Marks a value through which no gradient passes: an Identity node with a metadata property.

`ortflow.export` writes it for `detach()` and `no_grad()`, and `path` stops the gradient there. Other readers of the
model see an Identity.
"""

from __future__ import annotations

import onnx
from onnx import helper

KEY, VALUE = "ortflow.gradient", "stopped"
"""Metadata property of the node."""


def stops_gradient(node: onnx.NodeProto) -> bool:
    """Whether the node is such a mark."""
    return node.op_type == "Identity" and any(p.key == KEY and p.value == VALUE for p in node.metadata_props)


def stop(value: str, output: str, name: str) -> onnx.NodeProto:
    """A node that produces `output`: `value` without its gradient."""
    node = helper.make_node("Identity", [value], [output], name)
    node.metadata_props.add(key=KEY, value=VALUE)
    return node


def stopped_values(graph: onnx.GraphProto) -> list[str]:
    """The outputs of a graph's marks, in order."""
    return [node.output[0] for node in graph.node if stops_gradient(node)]
