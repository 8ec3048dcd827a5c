"""Operators that join values along an axis, or split them."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.operators.ranges import blocks_of
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, axis_of, token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, possible_weights


@gradient_rule("Concat")
def concat(b: Backward) -> Gradients:
    axis, inputs = b.attribute("axis", 0) % b.rank(0), list(b.node.input)
    wanted_places = [place for place in range(len(inputs)) if b.wants(place)]
    sizes = [(shapes.shape(b.context.types, name) or [None] * (axis + 1))[axis] for name in inputs]
    fixed_sizes = [size for size in sizes if size is not None]
    if len(fixed_sizes) < len(sizes) or len(wanted_places) == len(inputs):
        if len(fixed_sizes) == len(sizes):
            lengths = b.ints(*fixed_sizes)
        else:
            lengths = b("Concat", *(b("Shape", name, start=axis, end=axis + 1) for name in inputs), axis=0)
        parts = b.several("Split", len(inputs), b.gradient(), lengths, axis=axis)
        yield from ((place, parts[place]) for place in wanted_places)
        return
    for place in wanted_places:
        start = sum(fixed_sizes[:place])
        ends = b.ints(start), b.ints(start + fixed_sizes[place])
        yield place, b("Slice", b.gradient(), *ends, b.ints(axis))


@gradient_rule("Split")
def split(b: Backward) -> Gradients:
    """A part that the loss does not depend on gets a zero gradient."""
    parts = [b.gradient(place) or b.zeros(b.saved_output(place)) for place in range(len(b.node.output))]
    yield 0, b("Concat", *parts, axis=b.attribute("axis", 0)) if len(parts) > 1 else parts[0]


@division_rule("Concat")
def concat_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    axis = attributes_of(node)["axis"] % len(s.shape(node.output[0]))
    cut_axes = {cut.axis for cut in input_cuts if cut is not None}
    if len(cut_axes) > 1:
        raise s.unsupported(node)
    (place_of_cut,) = cut_axes
    if place_of_cut == axis:
        if not all(input_cuts) or any(cut.varies for cut in input_cuts if cut is not None):
            raise s.unsupported(node)
        return [Cut(axis, tuple(block for cut in input_cuts if cut is not None for block in cut.blocks))]
    cuts = {cut for cut in input_cuts if cut is not None}
    if len(cuts) > 1:
        raise s.unsupported(node)
    cut = cuts.pop()
    for slot, input_cut in enumerate(input_cuts):
        if input_cut is None:
            s.demand(place, slot, cut)
    return [cut]


@division_rule("Split")
def split_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None:
        raise s.unsupported(node)
    if attributes_of(node).get("axis", 0) % rank != cut.axis:
        return [cut] * len(node.output)
    if any(s.facts.size(name, cut.axis) is None for name in node.output):
        raise s.unsupported(node)
    sizes = tuple(s.shape(name)[cut.axis] for name in node.output)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    output_cuts = [
        blocks_of(s, node, cut, start, start + size, sizes) for start, size in zip(starts, sizes, strict=True)
    ]
    if len(node.input) > 1 and node.input[1]:
        s.plan.lists[place, 1] = sizes
    return output_cuts


@token_rule("Split")
def split_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    if not input_axes[0] or any(input_axes[1:]) or axis_of(s, node, 0) < input_axes[0]:
        raise Whole
    return [input_axes[0]] * len(node.output)


@token_rule("Concat")
def concat_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    if not input_axes[0] or len(set(input_axes)) > 1 or axis_of(s, node) < input_axes[0]:
        raise Whole
    return [input_axes[0]]


possible_weights(["Concat"], *range(1 << 16))
describe(["Concat", "Split"], Trait.MOVES, Trait.GIVES_SIZES, Trait.PASSES_STEEPNESS)
describe(["Split"], Trait.FIRST_DIVIDED)
