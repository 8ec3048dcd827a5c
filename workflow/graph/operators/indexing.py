"""Operators that read or write at indices, and those that select elements.

Gradients that meet at one element are added by ScatterElements, which ONNX Runtime runs in a fixed order on the CPU.
Its ScatterND splits the updates over threads whose additions race.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, possible_weights, weights


def zeros(w: Replacement, shape: str) -> str:
    """fp32 zeros with a shape that the graph computes."""
    return w("ConstantOfShape", shape)


def gathered_back(w: Replacement, shape: str, indices: str, gradient: str, axis: int) -> str:
    """Zeros of `shape`, with the gradient added at the positions that a Gather along `axis` read."""
    before, size, behind = _around(w, shape, axis)
    rows = w("Reshape", gradient, w("Concat", before, w.ints(-1), behind, axis=0))
    places = w("Expand", w("Reshape", indices, w.ints(-1, 1)), w("Shape", rows))
    target = zeros(w, w("Concat", before, size, behind, axis=0))
    added = w("ScatterElements", target, places, rows, axis=1, reduction="add")
    return w("Reshape", added, shape)


def _around(w: Replacement, shape: str, axis: int) -> tuple[str, str, str]:
    """Number of elements before an axis, along it and after it, each int64 [1]."""
    last = axis == -1
    size = w("Slice", shape, w.ints(axis), w.ints(2**31 - 1 if last else axis + 1))
    before = w.ints(1) if axis == 0 else _product(w, w("Slice", shape, w.ints(0), w.ints(axis)))
    behind = w.ints(1) if last else _product(w, w("Slice", shape, w.ints(axis + 1), w.ints(2**31 - 1)))
    return before, size, behind


def _product(w: Replacement, sizes: str) -> str:
    return w("ReduceProd", sizes, w.ints(0), keepdims=1)


@gradient_rule("Gather")
def gather(b: Backward) -> Gradients:
    """A single constant index is reversed by Pad."""
    axis, place, dims = b.attribute("axis", 0), b.value(1), b.shape(0)
    size = dims[axis]
    # Exporters read queries, keys and values that way, and ScatterElements takes several times the memory and time.
    if place is not None and place.size == 1 and place.ndim < 2 and size:
        before = int(place.reshape(-1)[0]) % size
        margins = np.zeros((2, len(dims)), np.int64)
        margins[:, axis] = before, size - 1 - before
        gradient = b.gradient() if place.ndim else b("Unsqueeze", b.gradient(), b.ints(axis % len(dims)))
        yield 0, b("Pad", gradient, b.ints(*margins.reshape(-1).tolist())) if size > 1 else gradient
        return
    yield 0, b("GatherGrad", b("Shape", b.input(0)), b.input(1), b.gradient(), domain=MICROSOFT, axis=axis)


@composition("GatherGrad")
def gather_gradient(w: Replacement) -> None:
    """GatherGrad(shape, indices, gradient): add the gradient's rows to zeros."""
    shape, indices, gradient = w.node.input
    w.done(gathered_back(w, shape, indices, gradient, w.attribute("axis", 0)))


@gradient_rule("GatherElements")
def gather_elements(b: Backward) -> Gradients:
    empty = b.zeros(b.input(0))
    axis = b.attribute("axis", 0)
    yield 0, b("ScatterElements", empty, b.input(1), b.gradient(), axis=axis, reduction="add")


@gradient_rule("GatherND")
def gather_nd(b: Backward) -> Gradients:
    """Treat the data as a matrix [indexable positions, elements of each], and scatter by row number."""
    batch = b.attribute("batch_dims", 0)
    depth = (shapes.shape(b.context.types, b.input(1)) or [None])[-1]
    if depth is None:
        raise b.refusal("the length of its indices is not known")
    end = batch + depth
    shape = b("Shape", b.input(0))
    sizes = [b("Slice", shape, b.ints(i), b.ints(i + 1)) for i in range(batch, end)]
    # Indices may count from the end; the remainder modulo the size is the position from the start.
    # ONNX's Mod of integers has the sign of the divisor, as Python's.
    places = b("Mod", b.input(1), b("Concat", *sizes, axis=0))
    strides = [b.ints(1)]
    for size in reversed(sizes[1:]):
        strides.insert(0, b("Mul", strides[0], size))
    rows = b("ReduceSum", b("Mul", places, b("Concat", *strides, axis=0)), b.ints(-1), keepdims=0)
    if batch:
        count = _product(b, b("Slice", shape, b.ints(0), b.ints(batch)))
        zero, one = b.constant(0, np.int64), b.constant(1, np.int64)
        starts = b("Mul", b("Range", zero, b("Squeeze", count), one), b("Mul", strides[0], sizes[0]))
        row_of_batch = b("Reshape", rows, b("Concat", count, b.ints(-1), axis=0))
        rows = b("Add", row_of_batch, b("Unsqueeze", starts, b.ints(1)))
    indexed, behind = (_product(b, b("Slice", shape, b.ints(i), b.ints(j))) for i, j in ((0, end), (end, 2**31 - 1)))
    gradient = b("Reshape", b.gradient(), b("Concat", b.ints(-1), behind, axis=0))
    numbers = b("Expand", b("Reshape", rows, b.ints(-1, 1)), b("Shape", gradient))
    empty = zeros(b, b("Concat", indexed, behind, axis=0))
    yield 0, b("Reshape", b("ScatterElements", empty, numbers, gradient, axis=0, reduction="add"), shape)


@gradient_rule("ScatterND")
def scatter_nd(b: Backward) -> Gradients:
    reduction = b.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise b.refusal(f"it scatters by {reduction}")
    if b.wants(0):
        nothing = b.zeros(b.input(2))
        # Threads may meet at one element, but all of them write 0.
        yield 0, b.gradient() if reduction == "add" else b("ScatterND", b.gradient(), b.input(1), nothing)
    if b.wants(2):
        yield 2, b("GatherND", b.gradient(), b.input(1))


@gradient_rule("ScatterElements")
def scatter_elements(b: Backward) -> Gradients:
    reduction, axis = b.attribute("reduction", "none"), b.attribute("axis", 0)
    if reduction in ("max", "min"):
        yield from _extreme(b, axis)
    elif reduction == "mul":
        yield from _product_of_updates(b, axis)
    else:
        if b.wants(0):
            if reduction == "add":
                yield 0, b.gradient()
            else:
                nothing = b.zeros(b.input(2))
                yield 0, b("ScatterElements", b.gradient(), b.input(1), nothing, axis=axis)
        if b.wants(2):
            yield 2, b("GatherElements", b.gradient(), b.input(1), axis=axis)


def _extreme(b: Backward, axis: int) -> Gradients:
    """Elements that equal the maximum or minimum share its gradient, as in PyTorch."""
    data, places, updates = b.node.input[:3]
    of_data = b("Cast", b("Equal", data, b.output(0)), to=TensorProto.FLOAT)
    extreme = b("GatherElements", b.output(0), places, axis=axis)
    of_updates = b("Cast", b("Equal", updates, extreme), to=TensorProto.FLOAT)
    count = b("ScatterElements", of_data, places, of_updates, axis=axis, reduction="add")
    share = b("Div", b.gradient(), count)
    if b.wants(0):
        yield 0, b("Mul", share, of_data)
    if b.wants(2):
        yield 2, b("Mul", b("GatherElements", share, places, axis=axis), of_updates)


def _product_of_updates(b: Backward, axis: int) -> Gradients:
    """The gradient of each factor is the product of the other factors times the gradient, also if factors are 0."""
    data, places, updates = b.node.input[:3]
    if b.wants(0):
        ones = b("Expand", b.constant(1.0), b("Shape", data))
        other_product = b("ScatterElements", ones, places, updates, axis=axis, reduction="mul")
        yield 0, b("Mul", b.gradient(), other_product)
    if b.wants(2):
        zero, one = b.constant(0.0), b.constant(1.0)
        no_data, no_update = b("Equal", data, zero), b("Equal", updates, zero)
        counts = [b("Cast", value, to=TensorProto.FLOAT) for value in (no_data, no_update)]
        count = b("ScatterElements", counts[0], places, counts[1], axis=axis, reduction="add")
        without = [b("Where", no_data, one, data), b("Where", no_update, one, updates)]
        product = b("ScatterElements", without[0], places, without[1], axis=axis, reduction="mul")
        # The other factors that are zero, and the product of those that are not.
        gathered = b("GatherElements", b("Mul", b.gradient(), product), places, axis=axis)
        other_product = b("Sub", b("GatherElements", count, places, axis=axis), counts[1])
        yield 2, b("Where", b("Equal", other_product, zero), b("Div", gathered, without[1]), zero)


@gradient_rule("TopK")
def top_k(b: Backward) -> Gradients:
    if b.gradient():
        empty = b.zeros(b.input(0))
        yield 0, b("ScatterElements", empty, b.saved_output(1), b.gradient(), axis=b.attribute("axis", -1))


@gradient_rule("Compress")
def compress(b: Backward) -> Gradients:
    places = b("Squeeze", b("NonZero", b.input(1)), b.ints(0))
    shape, axis = b("Shape", b.input(0)), b.attribute("axis", None)
    if axis is not None:
        yield 0, gathered_back(b, shape, places, b.gradient(), axis)
    else:
        size = b("Reshape", b("Size", b.input(0)), b.ints(1))
        flat = b("ScatterElements", zeros(b, size), places, b.gradient())
        yield 0, b("Reshape", flat, shape)


@division_rule("Gather")
def gather_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    axis = attributes_of(node).get("axis", 0) % rank
    if cut is None or any(input_cuts[1:]) or cut.axis == axis:
        raise s.unsupported(node)
    added = len(s.shape(node.input[1])) - 1
    return [cut if cut.axis < axis else cut.at(cut.axis + added)]


_TABLES = ("Gather", "GatherElements", "GatherND")
weights(_TABLES, 0)
possible_weights(["ScatterND", "ScatterElements"], 0, 2)
describe(_TABLES, Trait.LOOKS_UP)
describe(["Gather"], Trait.KEEPS_TYPE, Trait.MOVES, Trait.GIVES_SIZES, Trait.PASSES_STEEPNESS, Trait.FIRST_DIVIDED)
describe(["NonZero"], Trait.GIVES_SIZES)
