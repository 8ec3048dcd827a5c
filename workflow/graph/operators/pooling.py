"""Pooling."""

from __future__ import annotations

import math

import numpy as np
from onnx import helper

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement, set_attribute
from ortflow.workflow.graph.operators.indexing import zeros
from ortflow.workflow.graph.operators.windows import SPATIAL, Windows, cropped, sizes_of, spread, windows_of
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("MaxPool")
def max_pool(b: Backward) -> Gradients:
    """The gradient of each window goes to its first maximum, as in PyTorch. ONNX Runtime outputs its index."""
    if not b.gradient():
        return
    if b.attribute("storage_order", 0):
        if b.output(1):
            raise b.refusal("its indices are in column-major order")
        # Nobody reads the indices: row-major ones are positions in the flattened image.
        set_attribute(b.node, "storage_order", None)
    flags = {a.name: helper.get_attribute_value(a) for a in b.node.attribute}
    yield 0, b("MaxPoolGrad", b.gradient(), b.input(0), b.saved_output(1), domain=MICROSOFT, **flags)


def by_indices(w: Replacement, gradient: str, x: str, indices: str) -> str:
    """Gradient of max pooling; `indices` are positions in the flattened `x`."""
    shape, flat = w("Shape", x), w.ints(-1)
    empty = zeros(w, w("Reshape", w("Size", x), w.ints(1)))
    places, rows = w("Reshape", indices, flat), w("Reshape", gradient, flat)
    return w("Reshape", w("ScatterElements", empty, places, rows, axis=0, reduction="add"), shape)


@composition("MaxPoolGrad")
def max_pool_gradient(w: Replacement) -> None:
    """MaxPoolGrad(gradient, data, indices), with the attributes of the pooling."""
    w.done(by_indices(w, *w.node.input))


@gradient_rule("GlobalMaxPool")
def global_max_pool(b: Backward) -> Gradients:
    """The first maximum gets the gradient, as in PyTorch."""
    flat = b("Reshape", b.input(0), b.ints(0, 0, -1))
    first = b("ArgMax", flat, axis=2)
    rows = b("Reshape", b.gradient(), b.ints(0, 0, 1))
    scattered = b("ScatterElements", zeros(b, b("Shape", flat)), first, rows, axis=2)
    yield 0, b("Reshape", scattered, b("Shape", b.input(0)))


@gradient_rule("GlobalAveragePool")
def global_average_pool(b: Backward) -> Gradients:
    shape = b("Shape", b.input(0))
    sizes = (shapes.shape(b.context.types, b.input(0)) or [None] * (SPATIAL + 1))[SPATIAL:]
    if None in sizes:
        count = b("Cast", b("ReduceProd", b("Shape", b.input(0), start=SPATIAL), b.ints(0), keepdims=0), to=1)
        mean = b("Div", b.gradient(), count)
    else:
        mean = b("Mul", b.gradient(), b.constant(1 / math.prod(size or 1 for size in sizes)))
    yield 0, b("Expand", mean, shape)


@gradient_rule("AveragePool")
def average_pool(b: Backward) -> Gradients:
    kernel = b.attribute("kernel_shape", [])
    windows, image, first = windows_of(b, b.input(0), kernel, sizes_of(b, b.input(0), len(kernel)))
    gradient = b("Mul", b.gradient(), _share(b, windows, first))
    yield 0, _spread_evenly(b, gradient, windows, image, first)


def _share(b: Backward, windows: Windows, first: str) -> str:
    """Share of a window's gradient that goes to each of its elements inside the image."""
    padded = first or any(windows.pads)
    if not windows.ceil and (not padded or (b.attribute("count_include_pad", 0) and not first)):
        return b.constant(1 / math.prod(windows.kernel))
    # Average pooling of ones gives, for each window, the share of counted elements that lie inside the image.
    size = b("Concat", b.ints(1, 1), b("Shape", b.input(0), start=SPATIAL), axis=0)
    ones = b("Expand", b.constant(1.0), size)
    flags = {a.name: helper.get_attribute_value(a) for a in b.node.attribute}
    average = b("AveragePool", ones, **flags)
    _, image, _ = windows_of(b, ones, windows.kernel, windows.sizes)
    ends = [
        end + stride - 1 if windows.ceil else end for end, stride in zip(windows.ends, windows.strides, strict=True)
    ]
    kernel = b.constant(np.ones((1, 1, *windows.kernel)))
    pads = [*windows.begins, *ends]
    inside = b("Conv", image, kernel, strides=windows.strides, dilations=windows.dilations, pads=pads)
    if windows.ceil:
        axes = range(SPATIAL, SPATIAL + len(ends))
        inside = b("Slice", inside, b.ints(*(0 for _ in axes)), b("Shape", average, start=SPATIAL), b.ints(*axes))
    return b("Div", average, b("Max", inside, b.constant(1.0)))


def _spread_evenly(b: Backward, gradient: str, windows: Windows, image: str, first: str) -> str:
    """Add to each image element the gradients of the windows that contain it."""
    shape = b("Shape", b.input(0))
    planes = b("Reshape", gradient, b("Concat", b.ints(-1, 1), b("Shape", gradient, start=SPATIAL), axis=0))
    sums = spread(b, planes, b.constant(np.ones((1, 1, *windows.kernel))), windows, image)
    return b("Reshape", cropped(b, sums, first, b.input(0)), shape)


@gradient_rule("LpPool", "GlobalLpPool")
def norm_pool(b: Backward) -> Gradients:
    """y = (sum |x|^p)^(1/p), so dy/dx = sign(x) (|x| / y)^(p - 1), and 0 for a window of zeros."""
    x, y, p = b.input(0), b.output(0), b.attribute("p", 2)
    zero, one = b.constant(0.0), b.constant(1.0)
    gradient = b.gradient()
    if p != 1:
        nonzero = b("Where", b("Equal", y, zero), one, y)
        gradient = b("Div", gradient, nonzero if p == 2 else b("Pow", nonzero, b.constant(float(p - 1))))
    if b.node.op_type == "LpPool":
        kernel = b.attribute("kernel_shape", [])
        windows, image, first = windows_of(b, x, kernel, sizes_of(b, x, len(kernel)))
        gradient = _spread_evenly(b, gradient, windows, image, first)
    if p == 1:
        slope = b("Sign", x)
    elif p == 2:
        slope = x
    else:
        slope = b("Mul", b("Sign", x), b("Pow", b("Abs", x), b.constant(float(p - 1))))
    yield 0, b("Mul", gradient, slope)


@gradient_rule("MaxUnpool")
def max_unpool(b: Backward) -> Gradients:
    """Elements are copied to their places in the flat output, and so are their gradients back from there.

    Of two elements with one place, as windows that overlap give, both get the whole gradient, as in PyTorch.
    """
    flat, places = b("Reshape", b.gradient(), b.ints(-1)), b("Reshape", b.input(1), b.ints(-1))
    yield 0, b.reshaped(b("Gather", flat, places), b.input(0))


describe(["AveragePool", "GlobalAveragePool", "MaxPool"], Trait.PASSES_STEEPNESS)
