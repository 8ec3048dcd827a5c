"""Operators that change the axes of a value and keep its elements in their order, and Transpose, which moves axes."""

from __future__ import annotations

from dataclasses import replace

import onnx

from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.rules.cut import reshaped
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, reshaped_axes, token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Reshape", "Flatten")
def reshape(b: Backward) -> Gradients:
    yield 0, b.reshaped(b.gradient(), b.input(0))


@gradient_rule("Squeeze")
def squeeze(b: Backward) -> Gradients:
    if b.input(1):
        yield 0, b("Unsqueeze", b.gradient(), b.input(1))
    else:
        yield 0, b.reshaped(b.gradient(), b.input(0))


@gradient_rule("Unsqueeze")
def unsqueeze(b: Backward) -> Gradients:
    yield 0, b("Squeeze", b.gradient(), b.input(1))


@gradient_rule("Transpose")
def transpose(b: Backward) -> Gradients:
    order = list(b.attribute("perm", []))
    if order:
        yield 0, b("Transpose", b.gradient(), perm=[order.index(axis) for axis in range(len(order))])
    else:
        yield 0, b("Transpose", b.gradient())


@gradient_rule("Expand")
def expand(b: Backward) -> Gradients:
    yield 0, b.summed(b.gradient(), b.input(0), b.output(0))


@division_rule("Transpose")
def transpose_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    (cut,), rank = input_cuts, len(s.shape(node.input[0]))
    assert cut is not None
    order = list(attributes_of(node).get("perm", range(rank - 1, -1, -1)))
    return [cut.at(order.index(cut.axis))]


@division_rule("Unsqueeze")
def unsqueeze_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut, rank = input_cuts[0], len(s.shape(node.output[0]))
    added = s.axes(node, 1, rank)
    if cut is None or added is None:
        raise s.unsupported(node)
    return [cut.at([axis for axis in range(rank) if axis not in added][cut.axis])]


@division_rule("Squeeze")
def squeeze_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut, shape = input_cuts[0], s.shape(node.input[0])
    if cut is None:
        raise s.unsupported(node)
    gone = s.axes(node, 1, len(shape))
    if gone is None:
        gone = [axis for axis, size in enumerate(shape) if size == 1]
    if cut.axis in gone:
        raise s.unsupported(node)
    return [cut.at(cut.axis - sum(axis < cut.axis for axis in gone))]


@division_rule("Reshape", "Flatten")
def reshape_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
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


@division_rule("Expand")
def expand_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
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


@token_rule("Reshape")
def reshape_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    if not input_axes[0] or any(input_axes[1:]):
        raise Whole
    output_axes = reshaped_axes(s, node, input_axes[0])
    if output_axes > input_axes[0] and s.facts.value(node.input[1]) is None:
        raise Whole
    return [output_axes]


@token_rule("Transpose")
def transpose_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    axes, order = input_axes[0], attributes_of(node).get("perm")
    if not axes or order is None or list(order[:axes]) != list(range(axes)):
        raise Whole
    return [axes]


@token_rule("Squeeze", "Unsqueeze")
def squeeze_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    rank = max(s.rank(node.input[0]), s.rank(node.output[0]))
    listed = s.listed(node, 1, rank)
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise Whole
    return [input_axes[0]]


@token_rule("Shape")
def shape_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    # `sequence_graph` computes the sizes of the whole.
    return [None]


_KEEPING = ("Reshape", "Squeeze", "Unsqueeze")
describe([*_KEEPING, "Transpose"], Trait.KEEPS_TYPE)
describe([*_KEEPING, "Expand", "Flatten", "Transpose"], Trait.MOVES, Trait.PASSES_STEEPNESS)
describe([*_KEEPING, "ConstantOfShape", "Expand", "Range"], Trait.GIVES_SIZES)
describe([*_KEEPING, "Expand", "Flatten"], Trait.FIRST_DIVIDED)
