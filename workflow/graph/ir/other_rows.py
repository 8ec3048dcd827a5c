"""Whether samples may read others of their micro-batch, by an index that the batch provides."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of

_BY_AXIS = frozenset({"Gather", "GatherElements", "ScatterElements"})
_BY_PLACE = frozenset({"GatherND", "ScatterND"})


def reads_other_rows(graph: onnx.GraphProto, parameters: Collection[str]) -> bool:
    """Whether a node indexes the first axis of an activation by what is computed from an input.

    Such indices point behind the samples if a micro-batch is cut. The answer may be yes for a table that is computed
    from parameters.
    """
    fixed = {tensor.name for tensor in graph.initializer} | set(parameters)
    for node in graph.node:
        if node.op_type == "Constant" or (node.input and walk.inputs(node) <= fixed):
            fixed.update(node.output)
            continue
        if node.op_type in _BY_AXIS:
            first = attributes_of(node).get("axis", 0) == 0
        else:
            first = node.op_type in _BY_PLACE and not attributes_of(node).get("batch_dims", 0)
        if first and node.input[0] not in fixed and node.input[1] not in fixed:
            return True
    return False
