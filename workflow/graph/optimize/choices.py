"""Drops choices between a value and itself, which training graphs have of a value whose gradient was stopped in places.

`where(mask, x.detach(), x)` stops the gradient of `x` where the mask is true, such as that of an embedding's padding.
Once the graph is differentiated, both branches are `x`.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.order import prune


def drop_equal_choices(graph: onnx.GraphProto) -> None:
    """Let the readers of a Where read the value that both of its branches are, in place; a condition that would
    broadcast it is kept.

    For a graph that is not differentiated any more.
    """
    makers = walk.producers(graph)
    kept = {value.name for value in graph.output}
    for node in graph.node:
        for inner in walk.subgraphs(node):
            kept |= walk.captured(inner)
    dims = {name: dims_of(value) for name, value in described(graph).items()}

    def source(value: str) -> str:
        while (maker := makers.get(value)) is not None and maker.op_type == "Identity" and maker.domain == "":
            value = maker.input[0]
        return value

    names: dict[str, str] = {}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        if node.op_type != "Where" or node.domain != "" or node.output[0] in kept:
            continue
        value, known = source(node.input[1]), dims.get(node.output[0])
        if value == source(node.input[2]) and known is not None and None not in known and known == dims.get(value):
            names[node.output[0]] = value
    if names:
        prune(graph)
