"""Gives nodes inputs of their own where ONNX Runtime's gradient builder would give two gradients one name.

Called for graphs that the builder differentiates, after they are expanded.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.graph.functions import replace_nodes
from ortflow.workflow.graph.gradients import NAMES_EVERY_GRADIENT
from ortflow.workflow.graph.path import gradient_path
from ortflow.workflow.graph.writer import Writer, context_of


def separate_inputs(model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
    """Puts an Identity before each place where a gradient would be named twice, in place.

    That is a parameter that one node reads at two places, and a fixed input that two nodes of `NAMES_EVERY_GRADIENT`
    read.
    """
    context = context_of(model)
    path = gradient_path(model.graph, context.types, trained, [loss])
    nodes: list[onnx.NodeProto] = []
    seen: set[str] = set()
    for place, node in enumerate(model.graph.node):
        if place in path.nodes:
            w = Writer(node, context)
            names = list(node.input)
            for i, name in enumerate(names):
                twice = name in trained and names.count(name) > 1
                if twice or (name in seen and node.op_type in NAMES_EVERY_GRADIENT):
                    node.input[i] = w("Identity", name)
                elif name and name not in path.values and node.op_type in NAMES_EVERY_GRADIENT:
                    seen.add(name)
            nodes += w.nodes
        nodes.append(node)
    if len(nodes) > len(model.graph.node):
        replace_nodes(model.graph, nodes)
