"""Writes out BatchNormalization where ONNX Runtime would put it into a matrix product that cannot take it.

Called by `inference`. Once the weights are constants, ONNX Runtime makes one Gemm of a MatMul, the Reshape and
Transpose nodes behind it, and a BatchNormalization. With a MatMul of values of three axes such a model does not load,
and behind a Transpose that moves the channels it is wrong.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph import walk
from ortflow.workflow.graph.edit import Editor, attributes_of, described, dims_of, sort_nodes

_EPSILON = 1e-5


def write_out_behind_products(graph: onnx.GraphProto) -> None:
    """Replace such nodes, which are in evaluation mode, by products and sums, in place: (x - mean) * factor + bias."""
    makers, shapes = walk.producers(graph), described(graph)
    edit = Editor(graph)
    for node in list(graph.node):
        if node.op_type != "BatchNormalization" or node.domain != "" or not _behind_product(node, makers):
            continue
        x, scale, bias, mean, variance = node.input
        dims = dims_of(shapes[x]) if x in shapes else None
        if dims is None:
            continue
        column = edit.integers(-1, *[1] * (len(dims) - 2))
        epsilon = edit.constant(attributes_of(node).get("epsilon", _EPSILON))
        factor = edit.node("Div", scale, edit.node("Sqrt", edit.node("Add", variance, epsilon)))
        mean, factor, bias = (edit.node("Reshape", value, column) for value in (mean, factor, bias))
        graph.node.remove(node)
        scaled = edit.node("Mul", edit.node("Sub", x, mean), factor)
        edit.node("Add", scaled, bias, output=node.output[0])
    sort_nodes(graph)


def _behind_product(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> bool:
    """Whether only Reshape and Transpose nodes stand between a MatMul and the node."""
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in ("Reshape", "Transpose"):
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type == "MatMul"
