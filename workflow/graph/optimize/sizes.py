"""Writes the number of a value's elements as a product of its shape, for the CUDA provider. Called by `on_cuda`.

ONNX Runtime has Shape and Size among the GPU's nodes, with results in host memory. A CPU node that reads a Size waits
for the GPU, which no captured CUDA graph may contain; one that reads a Shape does not.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.functions import fresh_names


def sizes_by_shapes(graph: onnx.GraphProto) -> None:
    """Replace each Size, in place, by a ReduceProd of a Shape."""
    fresh = fresh_names(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.domain or node.op_type != "Size":
            nodes.append(node)
            continue
        shape = fresh(f"{node.output[0]}/shape")
        nodes.append(helper.make_node("Shape", node.input, [shape], shape))
        nodes.append(helper.make_node("ReduceProd", [shape], node.output, node.name, keepdims=0))
        graph.value_info.append(helper.make_tensor_value_info(shape, TensorProto.INT64, None))
    replace(graph.node, nodes)
