"""Means of cross-entropies as a sum divided by a count: only the sum has a kernel. Called by `ortflow.torch.graphs`."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.edit import Editor, attributes_of
from ortflow.workflow.graph.ir.order import sort_nodes


def divide_means(graph: onnx.GraphProto) -> None:
    """Replace each mean over rows without class weights, in place.

    A mean over no rows is 0 / 0, which is NaN as in PyTorch.
    """
    means = [node for node in graph.node if node.op_type == "SoftmaxCrossEntropyLoss" and node.domain == ""]
    means = [
        node for node in means if len(node.input) == 2 and attributes_of(node).get("reduction", b"mean") == b"mean"
    ]
    edit = Editor(graph)
    for node in means:
        flags, labels, mean = attributes_of(node), node.input[1], node.output[0]
        reduction = next((flag for flag in node.attribute if flag.name == "reduction"), None)
        if reduction is None:
            node.attribute.append(onnx.helper.make_attribute("reduction", "sum"))
        else:
            reduction.s = b"sum"
        node.output[0] = f"{mean}/sum"
        if "ignore_index" in flags:
            rows = edit("Not", edit("Equal", labels, edit.constant(flags["ignore_index"], "int64")))
            count = edit("ReduceSum", edit("Cast", rows, to=TensorProto.FLOAT), keepdims=0)
        else:
            count = edit("Cast", edit("Size", labels), to=TensorProto.FLOAT)
        edit("Div", node.output[0], count, output=mean)
    if means:
        sort_nodes(graph)
