"""The order of the training graph's nodes, which ONNX Runtime keeps and which decides what is held in memory together.

Called by `build` on each form of the graph, behind everything that puts nodes in.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import topological_order

_PASSED_ON = frozenset({"Add", "Cast", "Identity", "Mul", "Reshape", "Squeeze", "Sum", "Transpose", "Unsqueeze"})
"""Operators through which a gradient of a parameter gets to the output: cheap, and no larger than what they read."""


def results_first(graph: onnx.GraphProto) -> None:
    """Run what only results are made of as soon as it can be, in place; else the nodes stay in the order they have.

    The gradient of a weight needs two large values, its layer's input and the gradient of its output, and frees both.
    The nodes must be sorted. No result changes.
    """
    ends = _ends(graph)
    order = topological_order(graph.node, lambda place, nth: (place not in ends, place))
    replace(graph.node, [graph.node[place] for place in order])


def _ends(graph: onnx.GraphProto) -> set[int]:
    """Places of the nodes whose values are outputs, or lead to nothing but outputs by the operators of _PASSED_ON."""
    ends: set[int] = set()
    needed: set[str] = set()
    for place in range(len(graph.node) - 1, -1, -1):
        node = graph.node[place]
        if needed.isdisjoint(node.output):
            ends.add(place)
        if place not in ends or node.op_type not in _PASSED_ON:
            needed |= walk.inputs(node)
    return ends
