"""Operators that join values along an axis or take ranges of them.

Rules by which they act on divided inputs, and on shares of the tokens (`_of_tokens`).
"""

from __future__ import annotations

from itertools import pairwise

import onnx

from ortflow.workflow.graph.division import sequence, spread
from ortflow.workflow.graph.division.cut import Cut, Reblock
from ortflow.workflow.graph.division.sequence import Shares
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of

_LAST = 2**31


@spread.rule("Concat")
def _concat(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
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


@spread.rule("Split")
def _split(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None:
        raise s.unsupported(node)
    if attributes_of(node).get("axis", 0) % rank != cut.axis:
        return [cut] * len(node.output)
    if any(s.facts.size(name, cut.axis) is None for name in node.output):
        raise s.unsupported(node)
    sizes = tuple(s.shape(name)[cut.axis] for name in node.output)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    output_cuts = [_blocks(s, node, cut, start, start + size, sizes) for start, size in zip(starts, sizes, strict=True)]
    if len(node.input) > 1 and node.input[1]:
        s.plan.lists[place, 1] = sizes
    return output_cuts


def _blocks(s: spread.Spread, node: onnx.NodeProto, cut: Cut, start: int, stop: int, sizes: tuple[int, ...]) -> Cut:
    """The whole blocks within a range along a divided axis. Proposes to cut at its ends if there is none."""
    edges = [sum(cut.blocks[:i]) for i in range(len(cut.blocks) + 1)]
    if start in edges and stop in edges and not cut.varies:
        blocks = cut.blocks[edges.index(start) : edges.index(stop)]
        if blocks:
            return Cut(cut.axis, blocks)
    if cut.seed is not None and len(cut.blocks) == 1 and cut.seed not in s.refused and not cut.varies:
        raise Reblock(cut.seed, sizes)
    raise s.unsupported(node)


@spread.rule("Slice")
def _slice(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None or any(input_cuts[1:]):
        raise s.unsupported(node)
    axes = s.axes(node, 3, rank) if len(node.input) > 3 else list(range(s.shape(node.input[1])[0]))
    if axes is None:
        axes = list(range(s.shape(node.input[1])[0]))
    if cut.axis not in axes:
        return [cut]
    starts, ends = (s.facts.constant(node.input[slot]) for slot in (1, 2))
    steps = s.facts.constant(node.input[4]) if len(node.input) > 4 and node.input[4] else None
    if starts is None or ends is None or len(axes) > 1 or (steps is not None and int(steps[0]) != 1):
        raise s.unsupported(node)
    start, stop, _ = slice(int(starts[0]), int(min(ends[0], _LAST))).indices(cut.length)
    if (start, stop) == (0, cut.length):
        return [cut]
    edges = sorted({0, start, stop, cut.length, *_other_edges(s, node, cut)})
    sizes = tuple(end - begin for begin, end in pairwise(edges))
    output_cut = _blocks(s, node, cut, start, stop, sizes)
    s.plan.lists[place, 1], s.plan.lists[place, 2] = (start,), (stop,)
    return [output_cut]


def _other_edges(s: spread.Spread, node: onnx.NodeProto, cut: Cut) -> set[int]:
    """Where other slices of the same value begin and end along the divided axis."""
    edges: set[int] = set()
    for place, slot in s.facts.readers.get(node.input[0], []):
        other = s.facts.nodes[place]
        if other.op_type != "Slice" or slot != 0 or len(other.input) < 4:
            continue
        values = [s.facts.constant(other.input[i]) for i in (1, 2, 3)]
        if any(value is None or value.size != 1 for value in values):
            continue
        start, stop, axis = (int(value.reshape(-1)[0]) for value in values if value is not None)
        if axis % len(s.shape(node.input[0])) == cut.axis:
            edges |= set(slice(start, min(stop, _LAST)).indices(cut.length)[:2])
    return edges


@sequence.rule("Split")
def _split_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    if not input_axes[0] or any(input_axes[1:]) or sequence.axis_of(s, node, 0) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]] * len(node.output)


@sequence.rule("Slice")
def _slice_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    listed = s.listed(node, 3, s.rank(node.input[0])) if len(node.input) > 3 else None
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]]


@sequence.rule("Concat")
def _concat_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    if not input_axes[0] or len(set(input_axes)) > 1 or sequence.axis_of(s, node) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]]
