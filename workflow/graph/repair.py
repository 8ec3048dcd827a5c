"""Forms in which ONNX Runtime 1.19.2 cannot build an operator's gradient, or builds a wrong one without a word.

Called by `expand`. Each was found by comparing the gradient with finite differences (`gradients`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph import shapes
from ortflow.workflow.graph.decompose_activations import clip
from ortflow.workflow.graph.decompose_convolutions import convolution
from ortflow.workflow.graph.decompose_images import average_pool, pad
from ortflow.workflow.graph.decompose_linear import matrix_by_vector
from ortflow.workflow.graph.decompose_reductions import chained, with_kept_axes
from ortflow.workflow.graph.writer import Context, Writer, copy_of

Repair = Callable[[onnx.NodeProto, Context], "list[onnx.NodeProto] | None"]


def split(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Split with a part that the loss does not need, as slices: its gradient concatenates only those there are."""
    gradients = context.gradients
    if gradients is None or all(name in gradients for name in node.output):
        return None
    w = Writer(node, context)
    axis, count = w.attribute("axis", 0), len(node.output)
    size = w.shape(0)[axis]
    if w.input(1):
        lengths = [int(n) for n in w.known_value(1, "sizes")]
    else:
        if size is None:
            raise w.refusal("the size of its axis is not known and not all its parts are used")
        each = -(-size // count)
        lengths = [min(each, size - i * each) for i in range(count)]
    start = 0
    values = []
    for length in lengths:
        values.append(w("Slice", w.input(0), w.ints(start), w.ints(start + length), w.ints(axis)))
        start += length
    return w.done(*values)


def power(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Pow with an integer exponent, as one with a floating one; with a trained exponent, as exp(y log x)."""
    w = Writer(node, context)
    if context.gradients is not None and w.input(1) in context.gradients:
        return w.done(w("Exp", w("Mul", w.input(1), w("Log", w.input(0)))))
    if shapes.element_type(context.types, w.input(1)) in (TensorProto.FLOAT, TensorProto.UNDEFINED):
        return None
    return w.done(w("Pow", w.input(0), w("Cast", w.input(1), to=TensorProto.FLOAT)))


def scatter(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """ScatterElements that combines: ONNX Runtime takes any for one that overwrites.

    One that adds is data plus a scatter onto zeros. A maximum or minimum is the mean of the elements that equal it, so
    that they share its gradient, as in torch.
    """
    w = Writer(node, context)
    kind, axis = w.attribute("reduction", "none"), w.attribute("axis", 0)
    if kind == "none" or (kind == "add" and w.input(0) not in (context.gradients or ())):
        return None
    data, places, updates = node.input[:3]

    def added(onto: str, values: str) -> str:
        zeros = w("Expand", w.constant(0.0), w("Shape", data))
        return w("Add", onto, w("ScatterElements", zeros, places, values, axis=axis, reduction="add"))

    if kind == "add":
        return w.done(added(data, updates))
    if kind not in ("max", "min"):
        raise w.refusal(f"it scatters by {kind}")
    # The comparisons pass no gradient, so the scatter itself needs none.
    extreme = w("ScatterElements", data, places, updates, axis=axis, reduction=kind)
    zero = w.constant(0.0)
    of_data = w("Equal", data, extreme)
    of_updates = w("Equal", updates, w("GatherElements", extreme, places, axis=axis))
    total = added(w("Where", of_data, data, zero), w("Where", of_updates, updates, zero))
    return w.done(w("Div", total, added(_number(w, of_data), _number(w, of_updates))))


def _number(w: Writer, truth: str) -> str:
    return w("Cast", truth, to=TensorProto.FLOAT)


def slice_backwards(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Slice with a negative step, as Gather by a slice of the axis' places.

    ONNX Runtime differentiates it along the first axis only, and only where an axis behind that is longer than 1.
    """
    w = Writer(node, context)
    steps = w.value(4)
    if steps is None or (steps > 0).all():
        return None
    rank = w.rank(0)
    axes = [int(a) % rank for a in w.known_value(3, "axes")] if w.input(3) else list(range(len(steps)))
    starts, ends = w.known_value(1, "starts"), w.known_value(2, "ends")
    value, zero, one = w.input(0), w.constant(0, np.int64), w.constant(1, np.int64)
    for axis, *numbers in zip(axes, starts, ends, steps, strict=True):
        start, end, step = (w.ints(int(n)) for n in numbers)
        if numbers[2] > 0:
            value = w("Slice", value, start, end, w.ints(axis), step)
            continue
        size = w("Squeeze", w("Shape", value, start=axis, end=axis + 1))
        places = w("Slice", w("Range", zero, size, one), start, end, w.ints(0), step)
        value = w("Gather", value, places, axis=axis)
    return w.done(value)


def where(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Where with a branch that it broadcasts, as one that is as large as the result.

    ONNX Runtime's gradient is not summed over the axes that were broadcast.
    """
    w = Writer(node, context)
    whole = shapes.named_shape(context.types, w.output(0))
    small = [
        place
        for place in (1, 2)
        if w.input(place) in (context.gradients or ())
        and (whole is None or None in whole or shapes.named_shape(context.types, w.input(place)) != whole)
    ]
    if not small:
        return None
    # Only the shape of this one is used, so that no gradient goes through it.
    shape = w("Shape", w("Where", *node.input))
    branches = [w("Expand", w.input(p), shape) if p in small else w.input(p) for p in (1, 2)]
    return w.done(w("Where", w.input(0), *branches))


def recurrent(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """LSTM or GRU with fixed weights, as one whose weights get a gradient, which is then dropped.

    ONNX Runtime's gradient kernels crash where the gradient of a weight is not asked for.
    """
    gradients = context.gradients or ()
    fixed = [place for place in (1, 2) if node.input[place] not in gradients]
    reached = [name for name in node.input if name in gradients]
    if not fixed or not reached:
        return None
    w = Writer(node, context)
    copy = copy_of(node)
    other = w("ReduceSum", reached[0], keepdims=0)
    never = w.constant(False, np.bool_)
    for place in fixed:
        # Its value is the weight's to the last digit; the gradient of what is never chosen is 0.
        copy.input[place] = w("Where", never, w("Expand", other, w("Shape", w.input(place))), w.input(place))
    return [*w.nodes, copy]


def fixed_statistics(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """BatchNormalization by its running statistics, which ONNX Runtime differentiates as one by the batch's."""
    w = Writer(node, context)
    if w.attribute("training_mode", 0):
        return None
    rank = w.rank(0)
    scale, bias, mean, variance = (
        w("Unsqueeze", v, w.ints(*range(1, rank - 1))) if rank > 2 else v for v in node.input[1:]
    )
    deviation = w("Sqrt", w("Add", variance, w.constant(w.attribute("epsilon", 1e-5))))
    standardised = w("Div", w("Sub", w.input(0), mean), deviation)
    return w.done(w("Add", w("Mul", standardised, scale), bias))


REPAIRS: dict[str, Repair] = {
    "AveragePool": average_pool,
    "BatchNormalization": fixed_statistics,
    "Clip": clip,
    "Conv": convolution,
    "GRU": recurrent,
    "LSTM": recurrent,
    "MatMul": matrix_by_vector,
    "Max": chained,
    "Min": chained,
    "Pad": pad,
    "Pow": power,
    "ReduceL2": with_kept_axes,
    "ReduceLogSumExp": with_kept_axes,
    "ScatterElements": scatter,
    "Slice": slice_backwards,
    "Split": split,
    "Where": where,
}
"""Operator -> the nodes to stand for one of it, None where it is in a form that is differentiated right."""
