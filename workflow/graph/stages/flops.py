"""Floating-point operations of the products in a training graph, by the cost rules of the planner. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.operators.families import EXACT, UNCOUNTED
from ortflow.workflow.graph.stages.costs import KnownCosts


def flops_in(graph: onnx.ModelProto, batch: Mapping[str, Sequence[int]]) -> int | None:
    """Of the forward and the backward pass over inputs of these shapes, in the plain form of the graph.

    None if the graph has an operator without a rule, or a shape that does not follow from the inputs.
    """
    types = concrete(graph, batch)
    costs, total = KnownCosts(types), 0
    for node in graph.graph.node:
        if node.op_type in UNCOUNTED or any(flag.HasField("g") for flag in node.attribute):
            return None
        if node.op_type in EXACT:
            if any(name and name not in types for name in (*node.input, *node.output)):
                return None
            total += costs.flops(node)
    return total
