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
def _transpose(s: spread.Spread, place: int, node: onnx.NodeProto, given: spread.Given) -> Divided:
    (cut,), rank = given, len(s.shape(node.input[0]))
    assert cut is not None
    order = list(attributes_of(node).get("perm", range(rank - 1, -1, -1)))
    return [cut.at(order.index(cut.axis))]


@spread.rule("Unsqueeze")
def _unsqueeze(s: spread.Spread, place: int, node: onnx.NodeProto, given: spread.Given) -> Divided:
    cut, rank = given[0], len(s.shape(node.output[0]))
    added = s.axes(node, 1, rank)
    if cut is None or added is None:
        raise s.unsupported(node)
    return [cut.at([axis for axis in range(rank) if axis not in added][cut.axis])]


@spread.rule("Squeeze")
def _squeeze(s: spread.Spread, place: int, node: onnx.NodeProto, given: spread.Given) -> Divided:
    cut, shape = given[0], s.shape(node.input[0])
    if cut is None:
        raise s.unsupported(node)
    gone = s.axes(node, 1, len(shape))
    if gone is None:
        gone = [axis for axis, size in enumerate(shape) if size == 1]
    if cut.axis in gone:
        raise s.unsupported(node)
    return [cut.at(cut.axis - sum(axis < cut.axis for axis in gone))]


@spread.rule("Reshape", "Flatten")
def _reshape(s: spread.Spread, place: int, node: onnx.NodeProto, given: spread.Given) -> Divided:
    cut = given[0]
    if cut is None or any(given[1:]):
        raise s.unsupported(node)
    shapes = s.shape(node.input[0]), s.shape(node.output[0])
    made = reshaped(cut, *shapes, s.parts, propose=cut.seed not in s.refused)
    made = replace(made, varies=s.facts.size(node.output[0], made.axis) is None)
    if node.op_type == "Reshape":
        s.plan.sizes[place, 1] = made.axis, made
    if len(shapes[0]) < len(shapes[1]) and made.seed is None and not made.varies:
        s.plan.heads.append(made.length)
    return [made]


@spread.rule("Expand")
def _expand(s: spread.Spread, place: int, node: onnx.NodeProto, given: spread.Given) -> Divided:
    cut, (old, new) = given[0], (s.shape(node.input[0]), s.shape(node.output[0]))
    if cut is None or any(given[1:]):
        raise s.unsupported(node)
    made = cut.at(cut.axis + len(new) - len(old))
    axis = made.axis - (len(new) - s.shape(node.input[1])[0])
    listed = s.facts.value(node.input[1])
    if new[made.axis] != cut.length or (axis >= 0 and listed is None):
        raise s.unsupported(node)
    if axis >= 0 and listed is not None and listed[axis] != 1:
        s.plan.sizes[place, 1] = axis, made
    return [made]


@sequence.rule("Reshape")
def _reshape_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, given: sequence.Given) -> Shares:
    if not given[0] or any(given[1:]):
        raise sequence.Whole
    made = sequence.reshaped_axes(s, node, given[0])
    if made > given[0] and s.facts.value(node.input[1]) is None:
        raise sequence.Whole
    return [made]


@sequence.rule("Transpose")
def _transpose_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, given: sequence.Given) -> Shares:
    axes, order = given[0], attributes_of(node).get("perm")
    if not axes or order is None or list(order[:axes]) != list(range(axes)):
        raise sequence.Whole
    return [axes]


@sequence.rule("Squeeze", "Unsqueeze")
def _squeeze_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, given: sequence.Given) -> Shares:
    rank = max(s.rank(node.input[0]), s.rank(node.output[0]))
    listed = s.listed(node, 1, rank)
    if not given[0] or any(given[1:]) or not listed or min(listed) < given[0]:
        raise sequence.Whole
    return [given[0]]


@sequence.rule("Shape")
def _shape_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, given: sequence.Given) -> Shares:
    # `sequence_graph` computes the sizes of the whole.
    return [None]
