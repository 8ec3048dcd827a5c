"""Sums, means and extremes over several inputs or over axes, and running sums."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.writer import Context, Writer

_FACTORS = 1024
"""Slices of a product: the graph has a node for each."""


def sum_of_inputs(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Sum: a chain of Adds."""
    w = Writer(node, context)
    return w.done(_chain(w, "Add"))


def mean_of_inputs(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Mean: the sum over the number of inputs."""
    w = Writer(node, context)
    return w.done(w("Div", _chain(w, "Add"), w.constant(float(len(node.input)))))


def _chain(w: Writer, op_type: str) -> str:
    result = w.input(0)
    for name in w.node.input[1:]:
        result = w(op_type, result, name)
    return result


def chained(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Max or Min of more than two inputs, whose gradient ONNX Runtime gets wrong, as a chain of two each."""
    if len(node.input) == 2:
        return None
    w = Writer(node, context)
    return w.done(_chain(w, node.op_type))


def extreme(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """ReduceMax or ReduceMin: the mean of the elements that equal it, so that they share its gradient as in torch."""
    w = Writer(node, context)
    axes = [w.input(1)] if w.input(1) else []
    empty = w.attribute("noop_with_empty_axes", 0)
    return w.done(_extreme(w, node.op_type, axes, w.attribute("keepdims", 1), empty))


def global_max_pool(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """GlobalMaxPool as one window; where its size is not known, the extreme over all axes behind the channels.

    Of several extremes a window's gradient goes to the first, as in PyTorch, and a reduction's to all.
    """
    w = Writer(node, context)
    sizes = w.shape(0)[2:]
    if 0 < len(sizes) <= 3 and None not in sizes:
        return w.done(w("MaxPool", w.input(0), kernel_shape=sizes))
    return w.done(_extreme(w, "ReduceMax", [w.ints(*range(2, w.rank(0)))], 1, 0))


def _extreme(w: Writer, op_type: str, axes: list[str], keepdims: int, empty: int) -> str:
    x = w.input(0)
    # The comparison passes no gradient, so the reduction itself needs none.
    chosen = w("Equal", x, w(op_type, x, *axes, keepdims=1, noop_with_empty_axes=empty))
    total = w("ReduceSum", w("Where", chosen, x, w.constant(0.0)), *axes, keepdims=keepdims, noop_with_empty_axes=empty)
    return w(
        "Div", total, w("ReduceSum", w("Cast", chosen, to=1), *axes, keepdims=keepdims, noop_with_empty_axes=empty)
    )


def with_kept_axes(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """ReduceL2 or ReduceLogSumExp that drops its axes: keeps them, and drops them after.

    ONNX Runtime builds no valid gradient where all axes are dropped.
    """
    w = Writer(node, context)
    if w.attribute("keepdims", 1):
        return None
    axes = [w.input(1)] if w.input(1) else []
    empty = w.attribute("noop_with_empty_axes", 0)
    if empty and not axes:
        return w.done(w("Identity", w.input(0)))
    reduced = w(node.op_type, w.input(0), *axes, keepdims=1, noop_with_empty_axes=empty)
    return w.done(w("Squeeze", reduced, *axes))


def product(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """ReduceProd as a chain of products of slices, whose derivative is right where factors are 0, too."""
    w = Writer(node, context)
    shape = w.shape(0)
    rank = len(shape)
    if not w.input(1) and w.attribute("noop_with_empty_axes", 0):
        return w.done(w("Identity", w.input(0)))
    axes = [int(a) % rank for a in w.known_value(1, "axes")] if w.input(1) else list(range(rank))
    value = w.input(0)
    for axis in axes:
        size = shape[axis]
        if size is None or not 0 < size <= _FACTORS:
            raise w.refusal(f"the size of its axis {axis} is {'not known' if size is None else size}")
        parts = [w("Slice", value, w.ints(i), w.ints(i + 1), w.ints(axis)) for i in range(size)]
        value = parts[0]
        for part in parts[1:]:
            value = w("Mul", value, part)
    return w.done(value if w.attribute("keepdims", 1) or not axes else w("Squeeze", value, w.ints(*axes)))


def remainder(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Mod of floats (as C's fmod): x - y times the quotient without its fraction, whose derivative is 0."""
    w = Writer(node, context)
    quotient = w("Cast", w("Div", w.input(0), w.input(1)), to=TensorProto.INT64)
    return w.done(w("Sub", w.input(0), w("Mul", w.input(1), w("Cast", quotient, to=TensorProto.FLOAT))))


def cumulative_sum(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """CumSum: the product with a triangle of ones along the axis."""
    w = Writer(node, context)
    rank = w.rank(0)
    axis = int(w.known_value(1, "axes").reshape(-1)[0]) % rank
    order = [i for i in range(rank) if i != axis] + [axis]
    x = w("Transpose", w.input(0), perm=order) if axis != rank - 1 else w.input(0)
    length = w("Shape", w.input(0), start=axis, end=axis + 1)
    square = w("Concat", length, length, axis=0)
    ones = w("Expand", w.constant(1.0), square)
    reverse, exclusive = w.attribute("reverse", 0), w.attribute("exclusive", 0)
    offset = (-1 if reverse else 1) if exclusive else 0
    triangle = w("Trilu", ones, w.constant(offset, "int64"), upper=0 if reverse else 1)
    y = w("MatMul", x, triangle)
    back = [order.index(i) for i in range(rank)]
    return w.done(w("Transpose", y, perm=back) if axis != rank - 1 else y)


REDUCTIONS = {
    "Sum": sum_of_inputs,
    "Mean": mean_of_inputs,
    "ReduceMax": extreme,
    "ReduceMin": extreme,
    "GlobalMaxPool": global_max_pool,
    "CumSum": cumulative_sum,
    "Mod": remainder,
    "ReduceProd": product,
}
