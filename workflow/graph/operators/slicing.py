"""Slice and Pad, whose starts, ends and widths may be constants or computed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.operators.indexing import gathered_back
from ortflow.workflow.graph.operators.ranges import blocks_of
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Slice")
def cut(b: Backward) -> Gradients:
    steps = b.value(4) if b.input(4) else np.ones(1, np.int64)
    if steps is None or (steps != 1).any():
        yield 0, _put_back(b)
    else:
        margins = _known_margins(b)
        if margins is None:
            yield 0, _padded(b)
        else:
            yield 0, b("Pad", b.gradient(), b.ints(*margins)) if any(margins) else b.gradient()


def _known_margins(b: Backward) -> list[int] | None:
    """Number of elements before and after a slice with step 1, per axis; None if computed at run time."""
    starts, ends, shape = b.value(1), b.value(2), b.shape(0)
    axes = b.value(3) if b.input(3) else np.arange(len(shape))
    if starts is None or ends is None or axes is None:
        return None
    pads = [0] * (2 * len(shape))
    for axis, start, end in zip(axes.tolist(), starts.tolist(), ends.tolist(), strict=False):
        size = shape[axis]
        if size is None:
            return None
        # With a step of 1, ONNX clamps starts and ends as Python does.
        remaining = range(size)[start:end]
        first = remaining.start if remaining else 0
        pads[axis % len(shape)], pads[len(shape) + axis % len(shape)] = first, size - first - len(remaining)
    return pads


def _padded(b: Backward) -> str:
    """Zeros before and after a slice with step 1."""
    x, y = b.input(0), b.output(0)
    starts = _int64(b, b.input(1))
    if b.input(3):
        axes = _int64(b, b.input(3))
    else:
        axes = b("Range", b.constant(0, np.int64), b("Size", starts), b.constant(1, np.int64))
    sizes, lengths = (b("Gather", b("Shape", name), axes) for name in (x, y))
    from_end = b("Max", b("Add", starts, sizes), b.ints(0))
    before = b("Where", b("Less", starts, b.ints(0)), from_end, b("Min", starts, sizes))
    behind = b("Sub", b("Sub", sizes, before), lengths)
    return b("Pad", b.gradient(), b("Concat", before, behind, axis=0), "", axes)


def _put_back(b: Backward) -> str:
    """Scatter a slice with any steps back, one axis at a time: each position reads its element, or a zero stored at the
    end.
    """
    gradient = b.gradient()
    axes = _known_axes(b, b.shape(1)[0] or 0)
    zero, one = b.constant(0, np.int64), b.constant(1, np.int64)
    for i, axis in enumerate(axes):
        size = b("Shape", b.input(0), start=axis, end=axis + 1)
        start, end, step = (_int64(b, b("Slice", b.input(place), b.ints(i), b.ints(i + 1))) for place in (1, 2, 4))
        places = b("Slice", b("Range", zero, b("Squeeze", size), one), start, end, b.ints(0), step)
        count = b("Shape", places)
        order = b("Range", zero, b("Squeeze", count), one)
        readers = b("ScatterElements", b("Expand", count, size), places, order)
        behind = b("Pad", gradient, b.ints(0, 1), "", b.ints(axis))
        gradient = b("Gather", behind, readers, axis=axis)
    return gradient


def _known_axes(b: Backward, count: int) -> list[int]:
    """The axes that the node names, or the first `count` if it names none."""
    if not b.input(3):
        return list(range(count))
    return [int(axis) % b.rank(0) for axis in b.known_value(3, "axes")]


def _int64(b: Backward, value: str) -> str:
    return b("Cast", value, to=TensorProto.INT64)


@gradient_rule("Pad")
def pad(b: Backward) -> Gradients:
    mode, axes = b.attribute("mode", "constant"), b.input(3)
    if mode == "constant":
        pads = b.value(1)
        # Pad removes elements where a width is negative.
        widths = b("Neg", b.input(1)) if pads is None else b.ints(*(-pads).tolist())
        yield 0, b("Pad", b.gradient(), widths, *(["", axes] if axes else []))
        return
    gradient, along = b.gradient(), _known_axes(b, b.rank(0))
    for i, axis in enumerate(along):
        gradient = _unpadded(b, gradient, axis, i, len(along), mode)
    yield 0, gradient


def _unpadded(b: Backward, gradient: str, axis: int, i: int, count: int, mode: str) -> str:
    """Add up the elements that were copied along one axis; `i` is the axis' position in the `count` widths."""
    constant_widths = b.value(1)
    if constant_widths is not None:
        widths = b.ints(int(constant_widths[i]), int(constant_widths[count + i]))
        if not constant_widths[i] and not constant_widths[count + i]:
            return gradient
    else:
        parts = (b("Slice", b.input(1), b.ints(place), b.ints(place + 1)) for place in (i, count + i))
        widths = b("Concat", *parts, axis=0)
    size = b("Shape", b.input(0), start=axis, end=axis + 1)
    places = b("Range", b.constant(0, np.int64), b("Squeeze", size), b.constant(1, np.int64))
    sources = b("Pad", places, widths, mode=mode)
    ends = [b("Shape", gradient, start=0, end=axis)] if axis else []
    shape = b("Concat", *ends, size, b("Shape", gradient, start=axis + 1), axis=0)
    return gathered_back(b, shape, sources, gradient, axis)


_LAST = 2**31


@division_rule("Slice")
def slice_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
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
    output_cut = blocks_of(s, node, cut, start, stop, sizes)
    s.plan.lists[place, 1], s.plan.lists[place, 2] = (start,), (stop,)
    return [output_cut]


def _other_edges(s: Spread, node: onnx.NodeProto, cut: Cut) -> set[int]:
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


@token_rule("Slice")
def slice_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    listed = s.listed(node, 3, s.rank(node.input[0])) if len(node.input) > 3 else None
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise Whole
    return [input_axes[0]]


describe(["Slice"], Trait.KEEPS_TYPE, Trait.MOVES, Trait.GIVES_SIZES, Trait.PASSES_STEEPNESS, Trait.FIRST_DIVIDED)
describe(["Pad"], Trait.PASSES_STEEPNESS)
