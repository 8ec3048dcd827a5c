"""Softmax with the scale and mask before it, and its gradient with the scale after it; see softmax.c."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.rewriter import Rewriter, is_last_axis


def put(rewriter: Rewriter) -> None:
    """Replace every Softmax over the last axis, and every gradient of one."""
    for node in rewriter.nodes("Softmax"):
        dims = rewriter.dims(node.output[0])
        if rewriter.fits(node.output[0]) and is_last_axis(node, dims):
            _forward(rewriter, node)
    for node in rewriter.nodes("SoftmaxGrad_13", MICROSOFT):
        dims = rewriter.dims(node.input[1])
        if rewriter.fits(node.input[1]) and is_last_axis(node, dims):
            _backward(rewriter, node)


def _forward(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    inputs, scale, gone = [node.input[0]], 1.0, [node]
    add = rewriter.maker(inputs[0])
    if add is not None and add.op_type == "Add" and rewriter.only_reader(inputs[0]) is node:
        # Either of the two may be the mask: each is broadcast to the other.
        scores = next((v for v in add.input if _scaled(rewriter, v, add) is not None), add.input[0])
        if add.input[0] != add.input[1] and all(rewriter.fits(v) for v in add.input):
            inputs = [scores, next(v for v in add.input if v != scores)]
            gone.append(add)
    scaling = _scaled(rewriter, inputs[0], gone[-1])
    if scaling is not None:
        multiply, inputs[0], scale = scaling
        gone.append(multiply)
    rewriter.drop(*gone)
    rewriter.add("Softmax", inputs, node.output, scale=scale)


def _scaled(rewriter: Rewriter, value: str, reader: onnx.NodeProto) -> tuple[onnx.NodeProto, str, float] | None:
    """A Mul by a number, or a Div, that only `reader` reads: the node, its input, the factor."""
    node = rewriter.maker(value)
    if node is None or node.op_type not in ("Mul", "Div") or rewriter.only_reader(value) is not reader:
        return None
    return factor_of(rewriter, node)


def factor_of(rewriter: Rewriter, node: onnx.NodeProto) -> tuple[onnx.NodeProto, str, float] | None:
    """A Mul by a number, or a Div: the node, its input, the factor."""
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        scaled = node.input[1 - place]
        number = rewriter.number(node.input[place], scaled)
        if number:
            return node, scaled, number if node.op_type == "Mul" else 1 / number
    return None


def _backward(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    output, scale, gone = node.output[0], 1.0, [node]
    reader = rewriter.only_reader(output)
    if reader is not None and reader.op_type in ("Mul", "Div"):
        scaling = factor_of(rewriter, reader)
        if scaling is not None and scaling[1] == output:
            gone.append(reader)
            output, scale = reader.output[0], scaling[2]
    rewriter.drop(*gone)
    rewriter.add("SoftmaxGrad", node.input, [output], scale=scale)
