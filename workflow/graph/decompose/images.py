"""Padding in forms that ONNX Runtime or opset 18 does not have."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir.replacement import LAST, Context, Replacement, copy_of, set_attribute

_SPATIAL_FROM = 2


def wrapped(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Pad in mode `wrap`: the other end of the axis is appended before and after it."""
    w = Replacement(node, context)
    axes, before, after = _amounts(w)
    value = w.input(0)
    for axis in axes:
        if before[axis] < 0 or after[axis] < 0:
            raise w.refusal("it has negative pads")
        parts = [value]
        if before[axis]:
            parts.insert(0, w("Slice", value, w.ints(-before[axis]), w.ints(LAST), w.ints(axis)))
        if after[axis]:
            parts.append(w("Slice", value, w.ints(0), w.ints(after[axis]), w.ints(axis)))
        value = w("Concat", *parts, axis=axis) if len(parts) > 1 else value
    return w.done(value)


def _amounts(w: Replacement) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """The axes that are padded, and the amounts before and after each."""
    rank = w.rank(0)
    amounts = [int(n) for n in w.known_value(1, "pads")]
    axes = [int(a) % rank for a in w.known_value(3, "axes")] if w.input(3) else list(range(rank))
    before, after = amounts[: len(axes)], amounts[len(axes) :]
    return axes, dict(zip(axes, before, strict=True)), dict(zip(axes, after, strict=True))


def dilated_pads(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Conv or MaxPool with auto_pad SAME and dilations, with the same pads as numbers; None for any other node."""
    w = Replacement(node, context)
    mode, dilations = w.attribute("auto_pad", "NOTSET"), w.attribute("dilations", [])
    # ONNX Runtime does not support the combination.
    if not mode.startswith("SAME") or all(dilation == 1 for dilation in dilations):
        return None
    shape = w.shape(0)
    axes = len(shape) - _SPATIAL_FROM
    kernel = w.attribute("kernel_shape", None) or w.shape(1)[_SPATIAL_FROM:]
    strides = w.attribute("strides", [1] * axes)
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
