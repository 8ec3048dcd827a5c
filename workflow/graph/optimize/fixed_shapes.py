"""Writes the shapes of parameters as constants, so that no graph reads a parameter for its shape alone.

Called for the stages of a pipeline on GPUs. ONNX Runtime computes such shapes when it opens a session. It then holds an
input that nothing else reads in the host's memory, where it would be copied for each run.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.graph.ir.edit import attributes_of, dims_of, replace
from ortflow.workflow.graph.ir.order import drop_unread_inputs


def fix_shapes(graph: onnx.GraphProto) -> None:
    """Replace the shapes of inputs that have no dynamic axis, in place, and drop inputs that nothing else reads."""
    dims_of_inputs = {value.name: dims_of(value) for value in graph.input}
    nodes = []
    for node in graph.node:
        dims = dims_of_inputs.get(node.input[0]) if node.op_type == "Shape" and not node.domain else None
        if dims is None or not all(isinstance(size, int) for size in dims):
            nodes.append(node)
            continue
        flags = attributes_of(node)
        values = np.array(dims, np.int64)[slice(flags.get("start", 0), flags.get("end"))]
        nodes.append(helper.make_node("Constant", [], node.output, node.name, value=numpy_helper.from_array(values)))
    if any(node.op_type == "Constant" for node in nodes):
        replace(graph.node, nodes)
    drop_unread_inputs(graph)
