"""Operators that move axes.

Rules by which they act on divided inputs, and on shares of the tokens (`_of_tokens`).
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from ortflow.workflow.graph.division import sequence, spread
from ortflow.workflow.graph.division.cut import reshaped
from ortflow.workflow.graph.division.sequence import Shares
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of


@spread.rule("Transpose")
def _transpose(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    (cut,), rank = input_cuts, len(s.shape(node.input[0]))
    assert cut is not None
    order = list(attributes_of(node).get("perm", range(rank - 1, -1, -1)))
    return [cut.at(order.index(cut.axis))]


@spread.rule("Unsqueeze")
def _unsqueeze(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank = input_cuts[0], len(s.shape(node.output[0]))
    added = s.axes(node, 1, rank)
    if cut is None or added is None:
        raise s.unsupported(node)
    return [cut.at([axis for axis in range(rank) if axis not in added][cut.axis])]


@spread.rule("Squeeze")
def _squeeze(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, shape = input_cuts[0], s.shape(node.input[0])
    if cut is None:
        raise s.unsupported(node)
    gone = s.axes(node, 1, len(shape))
    if gone is None:
        gone = [axis for axis, size in enumerate(shape) if size == 1]
    if cut.axis in gone:
        raise s.unsupported(node)
    return [cut.at(cut.axis - sum(axis < cut.axis for axis in gone))]


@spread.rule("Reshape", "Flatten")
def _reshape(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut = input_cuts[0]
    if cut is None or any(input_cuts[1:]):
        raise s.unsupported(node)
    shapes = s.shape(node.input[0]), s.shape(node.output[0])
    output_cut = reshaped(cut, *shapes, s.parts, propose=cut.seed not in s.refused)
    output_cut = replace(output_cut, varies=s.facts.size(node.output[0], output_cut.axis) is None)
    if node.op_type == "Reshape":
        s.plan.sizes[place, 1] = output_cut.axis, output_cut
    if len(shapes[0]) < len(shapes[1]) and output_cut.seed is None and not output_cut.varies:
        s.plan.heads.append(output_cut.length)
    return [output_cut]


@spread.rule("Expand")
def _expand(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, (old, new) = input_cuts[0], (s.shape(node.input[0]), s.shape(node.output[0]))
    if cut is None or any(input_cuts[1:]):
        raise s.unsupported(node)
    output_cut = cut.at(cut.axis + len(new) - len(old))
    axis = output_cut.axis - (len(new) - s.shape(node.input[1])[0])
    listed = s.facts.value(node.input[1])
    if new[output_cut.axis] != cut.length or (axis >= 0 and listed is None):
        raise s.unsupported(node)
    if axis >= 0 and listed is not None and listed[axis] != 1:
        s.plan.sizes[place, 1] = axis, output_cut
    return [output_cut]


@sequence.rule("Reshape")
def _reshape_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    if not input_axes[0] or any(input_axes[1:]):
        raise sequence.Whole
    output_axes = sequence.reshaped_axes(s, node, input_axes[0])
    if output_axes > input_axes[0] and s.facts.value(node.input[1]) is None:
        raise sequence.Whole
    return [output_axes]


@sequence.rule("Transpose")
def _transpose_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    axes, order = input_axes[0], attributes_of(node).get("perm")
    if not axes or order is None or list(order[:axes]) != list(range(axes)):
        raise sequence.Whole
    return [axes]


@sequence.rule("Squeeze", "Unsqueeze")
def _squeeze_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    rank = max(s.rank(node.input[0]), s.rank(node.output[0]))
    listed = s.listed(node, 1, rank)
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]]


@sequence.rule("Shape")
def _shape_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    # `sequence_graph` computes the sizes of the whole.
    return [None]
