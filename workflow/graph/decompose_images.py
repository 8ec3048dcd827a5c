"""Pooling, padding and rearranging of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ortflow.workflow.graph.decompose_resize import LARGEST, along, of_unit_vectors
from ortflow.workflow.graph.writer import LAST, Context, Writer, copy_of, set_attribute

_SPATIAL_FROM = 2


def average_pool(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """AveragePool as a product with an averaging matrix along each axis, unless its whole shape is known.

    ONNX Runtime's gradient takes the shape from the graph, in which a batch that varies has length 0; over three axes
    it is wrong. An average over a window is one along each axis after the other, padding included or not.
    """
    w = Writer(node, context)
    shape = w.shape(0)
    rank = len(shape)
    axes = rank - _SPATIAL_FROM
    explicit = explicit_pads(node, context)
    if None not in shape and axes <= 2:
        return explicit
    w = Writer(explicit[0] if explicit else node, context)
    kernel, strides = w.attribute("kernel_shape", []), w.attribute("strides", [1] * axes)
    pads = w.attribute("pads", [0] * (2 * axes))
    value = w.input(0)
    if None in shape[_SPATIAL_FROM:]:
        return _average_by_convolution(w, kernel, strides, pads)
    for i, size in enumerate(shape[_SPATIAL_FROM:]):
        assert size is not None
        if not 0 < size * (size + pads[i] + pads[axes + i]) <= LARGEST:
            raise w.refusal(f"it would need a matrix of {size} rows")
        alone = copy_of(w.node)
        alone.input[:] = ["x"]
        set_attribute(alone, "kernel_shape", [1, kernel[i]])
        set_attribute(alone, "strides", [1, strides[i]])
        set_attribute(alone, "pads", [0, pads[i], 0, pads[axes + i]])
        value = along(w, value, i + _SPATIAL_FROM, rank, of_unit_vectors(alone, size))
    return w.done(value)


def _average_by_convolution(w: Writer, kernel: list[int], strides: list[int], pads: list[int]) -> list[onnx.NodeProto]:
    """An average over windows of images of any size: each channel alone, by a kernel of ones over what it counts."""
    if w.attribute("ceil_mode", 0):
        raise w.refusal("its ceil_mode depends on a size that is not known")
    ones = w.constant(np.ones((1, 1, *kernel)))
    window: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    spatial = w("Shape", w.input(0), start=_SPATIAL_FROM)
    alone = w("Concat", w.ints(-1, 1), spatial, axis=0)
    total = w("Conv", w("Reshape", w.input(0), alone), ones, **window)
    if any(pads) and not w.attribute("count_include_pad", 0):
        inside = w("Expand", w.constant(1.0), w("Concat", w.ints(1, 1), spatial, axis=0))
        count = w("Conv", inside, ones, **window)
    else:
        count = w.constant(float(np.prod(kernel)))
    outer = w("Shape", w.input(0), start=0, end=_SPATIAL_FROM)
    shape = w("Concat", outer, w("Shape", total, start=_SPATIAL_FROM), axis=0)
    return w.done(w("Reshape", w("Div", total, count), shape))


def depth_to_space(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Channels to blocks of pixels (Shi et al. 2016): reshape, transpose, reshape."""
    w = Writer(node, context)
    block = w.attribute("blocksize", 1)
    crd = w.attribute("mode", "DCR") == "CRD"
    n, c, height, width = (w("Shape", w.input(0), start=i, end=i + 1) for i in range(4))
    side = w.ints(block)
    fewer = w("Div", c, w.ints(block * block))
    split = [n, fewer, side, side, height, width] if crd else [n, side, side, fewer, height, width]
    parts = w("Reshape", w.input(0), w("Concat", *split, axis=0))
    turned = w("Transpose", parts, perm=[0, 1, 4, 2, 5, 3] if crd else [0, 3, 4, 1, 5, 2])
    shape = w("Concat", n, fewer, w("Mul", height, side), w("Mul", width, side), axis=0)
    return w.done(w("Reshape", turned, shape))


def space_to_depth(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Blocks of pixels to channels: reshape, transpose, reshape."""
    w = Writer(node, context)
    block = w.attribute("blocksize", 1)
    n, c, height, width = (w("Shape", w.input(0), start=i, end=i + 1) for i in range(4))
    side = w.ints(block)
    low, narrow = w("Div", height, side), w("Div", width, side)
    parts = w("Reshape", w.input(0), w("Concat", n, c, low, side, narrow, side, axis=0))
    turned = w("Transpose", parts, perm=[0, 3, 5, 1, 2, 4])
    return w.done(w("Reshape", turned, w("Concat", n, w("Mul", c, w.ints(block * block)), low, narrow, axis=0)))


def pad(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Pad by reflection, edge or wrapping, or along some axes only, by slices: ONNX Runtime differentiates none."""
    w = Writer(node, context)
    mode = w.attribute("mode", "constant")
    if mode == "constant" and not w.input(3):
        return None
    if mode == "constant":
        rank = w.rank(0)
        _, before, after = _amounts(w)
        pads = w.ints(*(before.get(i, 0) for i in range(rank)), *(after.get(i, 0) for i in range(rank)))
        return w.done(w("Pad", w.input(0), pads, *([w.input(2)] if w.input(2) else [])))
    return padded(node, context)


def padded(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Pad by reflection, edge or wrapping: slices of the input before and behind it."""
    w = Writer(node, context)
    axes, before, after = _amounts(w)
    value = w.input(0)
    for axis in axes:
        if before[axis] < 0 or after[axis] < 0:
            raise w.refusal("it pads by less than nothing")
        value = _padded(w, value, axis, w.attribute("mode", "constant"), before[axis], after[axis])
    return w.done(value)


def _amounts(w: Writer) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """The axes that are padded, and how much each is before and behind."""
    rank = w.rank(0)
    amounts = [int(n) for n in w.known_value(1, "pads")]
    axes = [int(a) % rank for a in w.known_value(3, "axes")] if w.input(3) else list(range(rank))
    before, after = amounts[: len(axes)], amounts[len(axes) :]
    return axes, dict(zip(axes, before, strict=True)), dict(zip(axes, after, strict=True))


def _padded(w: Writer, x: str, axis: int, mode: str, before: int, after: int) -> str:
    def part(start: int, end: int, step: int = 1) -> str:
        return w("Slice", x, w.ints(start), w.ints(end), w.ints(axis), w.ints(step))

    last = LAST
    parts = [x]
    if before:
        first = {
            "reflect": lambda: part(before, 0, -1),
            "edge": lambda: _repeated(w, part(0, 1), axis, before),
            "wrap": lambda: part(-before, last),
        }
        parts.insert(0, first[mode]())
    if after:
        final = {
            "reflect": lambda: part(-2, -2 - after, -1),
            "edge": lambda: _repeated(w, part(-1, last), axis, after),
            "wrap": lambda: part(0, after),
        }
        parts.append(final[mode]())
    return w("Concat", *parts, axis=axis) if len(parts) > 1 else x


def _repeated(w: Writer, x: str, axis: int, times: int) -> str:
    return w("Tile", x, w.ints(*(times if i == axis else 1 for i in range(w.rank(0)))))


def explicit_pads(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Conv or AveragePool with auto_pad SAME, which ONNX Runtime's gradients ignore, with the same pads in numbers."""
    w = Writer(node, context)
    mode = w.attribute("auto_pad", "NOTSET")
    if not mode.startswith("SAME"):
        return None
    shape = w.shape(0)
    axes = len(shape) - _SPATIAL_FROM
    kernel = w.attribute("kernel_shape", None) or w.shape(1)[_SPATIAL_FROM:]
    strides, dilations = w.attribute("strides", [1] * axes), w.attribute("dilations", [1] * axes)
    begins, ends = [], []
    for size, k, stride, dilation in zip(shape[_SPATIAL_FROM:], kernel, strides, dilations, strict=True):
        if k is None or (size is None and stride != 1):
            raise w.refusal("its auto_pad depends on a size that is not known")
        reach = dilation * (k - 1)
        total = reach if size is None else max(0, (-(-size // stride) - 1) * stride + reach + 1 - size)
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    copy = copy_of(node)
    set_attribute(copy, "auto_pad", None)
    set_attribute(copy, "pads", [*begins, *ends])
    return [copy]


def dilated_pads(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Conv with auto_pad SAME and dilations, which ONNX Runtime refuses to compute, with the same pads in numbers."""
    dilations = Writer(node, context).attribute("dilations", [])
    return explicit_pads(node, context) if any(dilation != 1 for dilation in dilations) else None


IMAGES = {"DepthToSpace": depth_to_space, "SpaceToDepth": space_to_depth}
