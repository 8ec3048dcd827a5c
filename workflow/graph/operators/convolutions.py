"""Convolutions, and their gradients in ONNX operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.operators.windows import SPATIAL, Windows, cropped, met, sizes_of, spread, windows_of
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.cost import Sizes, cost_rule
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.precision import half_products
from ortflow.workflow.graph.rules.traits import Trait, describe, weights

_FEW_CHANNELS = 16
"""Below this, one convolution with the gradient as its kernel is faster than a matrix product per kernel position."""
_MANY_PLACES = 64
_SMALL_SAMPLE = 150_000
"""Elements per sample for which a depthwise convolution's products of whole images fit the CPU cache."""
_SMALL_KERNEL = 16
_WEIGHTS_PER_PIXEL = 4096
"""Above this, flipping the weights costs more than a plain convolution saves over a transposed one."""


def kernel_of(w: Replacement, place: int) -> list[int]:
    """Sizes of the kernel that input `place` holds. Raises UserError if they are unknown."""
    kernel_shape = w.attribute("kernel_shape", None)
    if kernel_shape:
        return [int(size) for size in kernel_shape]
    dims = shapes.shape(w.context.types, w.input(place))
    if dims is None or None in dims[SPATIAL:]:
        raise w.refusal("the shape of its weight is not known")
    return [size for size in dims[SPATIAL:] if size is not None]


def data_gradient(w: Replacement, gradient: str, weight: str, windows: Windows, x: str, group: int) -> str:
    """Gradient of a convolution with respect to its data `x`."""
    dims = shapes.shape(w.context.types, weight)
    begins, ends = (
        [reach - 1 - n for reach, n in zip(windows.reaches, pads, strict=True)]
        for pads in (windows.begins, windows.ends)
    )
    pixels = math.prod(count or 1 for count in windows.counts) if None not in windows.counts else None
    if (
        dims is None
        or None in dims
        or min(*begins, *ends) < 0
        or any(stride > 1 for stride in windows.strides)
        or (group > 1 and dims[1] == 1)
        or (pixels is not None and math.prod(n or 1 for n in dims) > _WEIGHTS_PER_PIXEL * pixels)
    ):
        return spread(w, gradient, weight, windows, x, group)
    # A convolution of the gradient with each kernel flipped, with input and output channels exchanged.
    outer, inner = dims[0] or 0, dims[1] or 0
    volume = math.prod(windows.kernel)
    outer_of_group = outer // group
    if group == 1 and volume == 1:
        turned = w("Transpose", weight, perm=[1, 0, *range(SPATIAL, len(dims))])
    else:
        parts = w("Transpose", w("Reshape", weight, w.ints(group, outer_of_group, inner, volume)), perm=[3, 0, 2, 1])
        if volume > 1:
            parts = w("Gather", parts, w.ints(*reversed(range(volume))))
        turned = w("Transpose", parts, perm=[1, 2, 3, 0])
        turned = w("Reshape", turned, w.ints(group * inner, outer_of_group, *windows.kernel))
    return w("Conv", gradient, turned, group=group, dilations=windows.dilations, pads=[*begins, *ends])


def weight_gradient(w: Replacement, gradient: str, image: str, weight: str, windows: Windows, group: int) -> str:
    """Gradient of a convolution of `image` with respect to its weight."""
    dims = shapes.shape(w.context.types, weight)
    axes = range(SPATIAL, SPATIAL + len(windows.kernel))
    # As the convolution below it took 163 ms for 256 to 64 channels, and 1.19.2's ConvGrad 4, on two threads.
    if group == 1 and windows.are_pixels:
        flat = w.ints(0, 0, -1)
        rows, columns = w("Reshape", gradient, flat), w("Transpose", w("Reshape", image, flat), perm=[0, 2, 1])
        product = w("ReduceSum", w("MatMul", rows, columns), w.ints(0), keepdims=0)
        return w("Unsqueeze", product, w.ints(*axes))
    if group > 1 and dims is not None and dims[:2] == [group, 1] and _is_small(windows, group):
        return _by_products(w, gradient, image, windows)
    channels = None if dims is None else dims[1]
    swapped = [1, 0, *axes]
    if group > 1 or channels is None or channels < _FEW_CHANNELS or math.prod(windows.kernel) > _MANY_PLACES:
        return _by_convolution(w, gradient, image, windows, group, swapped)
    # One matrix product per kernel position.
    rows = w("Reshape", w("Transpose", gradient, perm=swapped), w.ints(0, -1))
    turned = w("Transpose", _padded(w, image, windows), perm=swapped)
    parts = []
    for place in itertools.product(*map(range, windows.kernel)):
        columns = w("Reshape", met(w, turned, windows, place, gradient), w.ints(0, -1))
        parts.append(w("Unsqueeze", w("Gemm", rows, columns, transB=1), w.ints(2)))
    total = w("Concat", *parts, axis=2) if len(parts) > 1 else parts[0]
    return w("Reshape", total, w.ints(0, 0, *windows.kernel))


def _padded(w: Replacement, image: str, windows: Windows) -> str:
    if not any(windows.pads):
        return image
    return w("Pad", image, w.ints(0, 0, *windows.begins, 0, 0, *windows.ends))


def _is_small(windows: Windows, channels: int) -> bool:
    return (
        None not in windows.sizes
        and channels * math.prod(size or 1 for size in windows.sizes) <= _SMALL_SAMPLE
        and math.prod(windows.kernel) <= _SMALL_KERNEL
        and all(stride == 1 for stride in windows.strides)
    )


def _by_products(w: Replacement, gradient: str, image: str, windows: Windows) -> str:
    """Per channel and kernel position: the sum of the gradient times the image elements it is computed from."""
    padded, flat = _padded(w, image, windows), w.ints(0, 0, -1)
    rows, over = w("Reshape", gradient, flat), w.ints(0, SPATIAL)
    parts = []
    for place in itertools.product(*map(range, windows.kernel)):
        product = w("Mul", w("Reshape", met(w, padded, windows, place, gradient), flat), rows)
        parts.append(w("Unsqueeze", w("ReduceSum", product, over, keepdims=0), w.ints(1)))
    columns = w("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    return w("Reshape", columns, w.ints(-1, 1, *windows.kernel))


def _by_convolution(
    w: Replacement, gradient: str, image: str, windows: Windows, group: int, swapped: Sequence[int]
) -> str:
    """A convolution over the samples with the gradient as kernel; strides and dilations are exchanged."""
    rank = len(swapped)
    spatial = list(range(SPATIAL, rank))
    if group > 1:
        # [N, C, ...] as [C/group, group N, ...]
        size = w("Shape", image, start=SPATIAL)
        parts = w("Reshape", image, w("Concat", w.ints(0, group, -1), size, axis=0))
        turned = w("Transpose", parts, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
        count = w("Mul", w("Shape", image, start=0, end=1), w.ints(group))
        image = w("Reshape", turned, w("Concat", w.ints(0), count, size, axis=0))
    else:
        image = w("Transpose", image, perm=swapped)
    product = w(
        "Conv",
        image,
        w("Transpose", gradient, perm=swapped),
        group=group,
        strides=windows.dilations,
        dilations=windows.strides,
        pads=windows.pads,
    )
    extents = zip(
        windows.sizes, windows.counts, windows.strides, windows.reaches, windows.begins, windows.ends, strict=True
    )
    if any(
        stride > 1 and (size is None or count is None or (count - 1) * stride + reach != size + begin + end)
        for size, count, stride, reach, begin, end in extents
    ):
        # Elements that no window covers make the result larger.
        product = w("Slice", product, w.ints(*(0 for _ in spatial)), w.ints(*windows.kernel), w.ints(*spatial))
    return w("Transpose", product, perm=swapped)


def bias_gradient(w: Replacement, gradient: str, axes: int) -> str:
    """Gradient of a convolution with respect to its bias."""
    return w("ReduceSum", gradient, w.ints(0, *range(SPATIAL, SPATIAL + axes)), keepdims=0)


@gradient_rule("Conv")
def convolution(b: Backward) -> Gradients:
    kernel = kernel_of(b, 1)
    group, axes = b.attribute("group", 1), len(kernel)
    windows, image, first = windows_of(b, b.input(0), kernel, sizes_of(b, b.input(0), axes))
    # For groups, ConvGrad clears memory that it does not own unless the kernel has two axes.
    if not first and (axes == 2 or group == 1):
        wants = [b.wants(place) for place in range(3)]
        inputs, flags = (b.gradient(), *b.node.input[:2]), _written(windows, group)
        names = b.some("ConvGrad", wants, *inputs, domain=MICROSOFT, **flags)
        yield from ((place, name) for place, name in enumerate(names) if name)
        return
    if b.wants(2):
        yield 2, bias_gradient(b, b.gradient(), axes)
    if b.wants(1):
        yield 1, weight_gradient(b, b.gradient(), image, b.input(1), windows, group)
    if b.wants(0):
        of_data = data_gradient(b, b.gradient(), b.input(1), windows, image, group)
        yield 0, cropped(b, of_data, first, b.input(0))


@gradient_rule("ConvTranspose")
def transposed(b: Backward) -> Gradients:
    """A transposed convolution is the gradient of a convolution with respect to its data, so its gradient is that
    convolution.
    """
    kernel = kernel_of(b, 1)
    group, axes = b.attribute("group", 1), len(kernel)
    windows = _of_transposed(b, kernel)
    if b.wants(2):
        yield 2, bias_gradient(b, b.gradient(), axes)
    flags = _written(windows, group)
    if b.wants(1):
        inputs = b.input(0), b.gradient(), b.input(1)
        _, of_weight, _ = b.some("ConvGrad", [False, True, False], *inputs, domain=MICROSOFT, **flags)
        yield 1, of_weight
    if b.wants(0):
        yield 0, b("Conv", b.gradient(), b.input(1), **flags)


def _written(windows: Windows, group: int) -> dict[str, Any]:
    """The attributes of a convolution."""
    return {
        "group": group,
        "kernel_shape": windows.kernel,
        "strides": windows.strides,
        "dilations": windows.dilations,
        "pads": windows.pads,
    }


def _of_transposed(b: Backward, kernel: list[int]) -> Windows:
    """The windows over the node's output, whose pads may depend on the requested output size."""
    axes = len(kernel)
    ones = [1] * axes
    strides, dilations = b.attribute("strides", None) or ones, b.attribute("dilations", None) or ones
    pads = b.attribute("pads", None) or [0] * (2 * axes)
    mode, output_shape = b.attribute("auto_pad", "NOTSET"), b.attribute("output_shape", None)
    extra = b.attribute("output_padding", None) or [0] * axes
    sizes = sizes_of(b, b.output(0), axes)
    if any(n >= stride for n, stride in zip(extra, strides, strict=True)):
        # ONNX Runtime computes a different result in this case, or none.
        raise b.refusal("its output_padding is not below its strides")
    if mode == "VALID" and not output_shape:
        pads = [0] * (2 * axes)
    elif output_shape or mode != "NOTSET":
        begins, ends = [], []
        for axis, size in enumerate(sizes_of(b, b.input(0), axes)):
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            if output_shape and size is None:
                raise b.refusal("its pads depend on a size that is not known")
            # Without a requested size, the output has one stride per input element.
            lacking = output_shape[axis] - strides[axis] * ((size or 0) - 1) if output_shape else strides[axis]
            total = extra[axis] + reach - lacking
            if total < 0:
                raise b.refusal("its output is longer than its kernel reaches")
            fewer = total // 2
            upper = mode == "SAME_UPPER"
            begins.append(fewer if upper else total - fewer)
            ends.append(total - fewer if upper else fewer)
        pads = [*begins, *ends]
    return Windows(kernel, strides, dilations, pads[:axes], pads[axes:], sizes)


@composition("ConvGrad")
def convolution_gradients(w: Replacement) -> None:
    """ConvGrad(gradient, data, weight)."""
    gradient, x, weight = w.node.input
    kernel, group = kernel_of(w, 2), w.attribute("group", 1)
    windows, *_ = windows_of(w, x, kernel, sizes_of(w, x, len(kernel)))
    # Gradients of parameters come first: no other node then needs what they read.
    of_bias = bias_gradient(w, gradient, len(kernel)) if w.output(2) else ""
    of_weight = weight_gradient(w, gradient, x, weight, windows, group) if w.output(1) else ""
    of_data = data_gradient(w, gradient, weight, windows, x, group) if w.output(0) else ""
    w.done(of_data, of_weight, of_bias)


@cost_rule("Conv", "ConvTranspose")
def products_of_windows(node: onnx.NodeProto, sizes: Sizes) -> int:
    weight = sizes.dims(node.input[1])
    larger = node.output[0] if node.op_type == "Conv" else node.input[0]
    return 2 * sizes.elements(larger) * math.prod(weight[1:]) if weight else 0


_CONVOLUTIONS = ("Conv", "ConvTranspose")
# ONNX allows them in bf16 only from opset 22.
half_products(*_CONVOLUTIONS, kinds=[TensorProto.FLOAT16])
weights(_CONVOLUTIONS, 1, 2)
describe(_CONVOLUTIONS, Trait.KEEPS_TYPE, Trait.LINEAR, Trait.HEAVY)
describe(["DeformConv"], Trait.HEAVY)
