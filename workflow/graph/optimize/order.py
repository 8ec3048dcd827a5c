"""Orders the training graph's nodes, which ONNX Runtime keeps, to reduce the memory held at a time.

Called by `assembly` on each form of the graph, after all passes that insert nodes.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import topological_order

_PASSED_ON = frozenset({"Add", "Cast", "Identity", "Mul", "Reshape", "Squeeze", "Sum", "Transpose", "Unsqueeze"})
"""Operators between a parameter's gradient and the output: cheap, and with outputs no larger than their inputs."""


def results_first(graph: onnx.GraphProto) -> None:
    """Run nodes that only outputs depend on as early as possible, in place; other nodes keep their order.

    The gradient of a weight needs two large values, its layer's input and the gradient of its output, and frees both.
    Nodes must be sorted. Results do not change.
    """
    ends = _ends(graph)
    order = topological_order(graph.node, lambda place, nth: (place not in ends, place))
    replace(graph.node, [graph.node[place] for place in order])


def _ends(graph: onnx.GraphProto) -> set[int]:
    """Positions of the nodes whose values are outputs, or reach only outputs through operators of _PASSED_ON."""
    ends: set[int] = set()
    names_read: set[str] = set()
    for place in range(len(graph.node) - 1, -1, -1):
        node = graph.node[place]
        if names_read.isdisjoint(node.output):
            ends.add(place)
        if place not in ends or node.op_type not in _PASSED_ON:
            names_read |= walk.inputs(node)
    return ends
