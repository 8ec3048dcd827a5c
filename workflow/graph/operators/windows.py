"""Sliding windows over images: their positions, and the adjoint that maps windows back to the image.

Used by convolutions and pooling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement

SPATIAL = 2
"""The first spatial axis, after batch and channels."""


@dataclass(frozen=True)
class Windows:
    """Geometry of windows, one number per spatial axis."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    begins: Sequence[int]
    """Padding before the image."""
    ends: Sequence[int]
    """Padding after it."""
    sizes: Sequence[int | None]
    """Size of the image, None if unknown."""
    ceil: bool = False
    """Whether a last window may extend beyond the padding. Versions of ONNX Runtime differ in the count."""

    @property
    def reaches(self) -> list[int]:
        """Number of elements that a window spans."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def counts(self) -> list[int | None]:
        """Number of windows along each axis, None if unknown."""
        return [self._count(axis) for axis in range(len(self.kernel))]

    def _count(self, axis: int) -> int | None:
        size = self.sizes[axis]
        if size is None or self.ceil:
            return None
        return (size + self.begins[axis] + self.ends[axis] - self.reaches[axis]) // self.strides[axis] + 1

    @property
    def pads(self) -> list[int]:
        """In ONNX's order."""
        return [*self.begins, *self.ends]

    @property
    def are_pixels(self) -> bool:
        """Whether windows and pixels correspond one to one."""
        return all(n == 1 for n in (*self.kernel, *self.strides)) and not any(self.pads)


def sizes_of(w: Replacement, x: str, axes: int) -> list[int | None]:
    """Sizes of the spatial axes, None if unknown."""
    dims = shapes.shape(w.context.types, x)
    return [None] * axes if dims is None else dims[SPATIAL:]


def windows_of(w: Replacement, x: str, kernel: Sequence[int], sizes: Sequence[int | None]) -> tuple[Windows, str, str]:
    """The windows of a node over the image `x`, which is padded first if pads are only known at run time.

    Returns
    -------
    windows : Windows
        The windows.
    image : str
        The image that they slide over.
    first : str
        If the image is not `x` itself, the int64 vector with the position of `x` in it; else empty.
    """
    axes = len(kernel)
    strides, dilations = w.attribute("strides", None) or [1] * axes, w.attribute("dilations", None) or [1] * axes
    pads = w.attribute("pads", None) or [0] * (2 * axes)
    mode, ceil = w.attribute("auto_pad", "NOTSET"), bool(w.attribute("ceil_mode", 0))
    if not mode.startswith("SAME"):
        if mode == "VALID":
            pads = [0] * (2 * axes)
        return Windows(kernel, strides, dilations, pads[:axes], pads[axes:], sizes, ceil), x, ""
    plain = Windows(kernel, strides, dilations, [0] * axes, [0] * axes, sizes)
    if any(size is None and stride > 1 for size, stride in zip(sizes, strides, strict=True)):
        first, padded = _padded_to_same(w, x, plain, mode)
        return Windows(kernel, strides, dilations, [0] * axes, [0] * axes, [None] * axes), padded, first
    totals = [
        # The size is unknown with a stride of 1 only, where it cancels.
        reach - 1 if size is None else max(0, (-(-size // stride) - 1) * stride + reach - size)
        for size, stride, reach in zip(sizes, strides, plain.reaches, strict=True)
    ]
    fewer, larger = [n // 2 for n in totals], [n - n // 2 for n in totals]
    begins, ends = (fewer, larger) if mode == "SAME_UPPER" else (larger, fewer)
    return Windows(kernel, strides, dilations, begins, ends, sizes), x, ""


def _padded_to_same(w: Replacement, x: str, windows: Windows, mode: str) -> tuple[str, str]:
    size, strides = w("Shape", x, start=SPATIAL), w.ints(*windows.strides)
    count = w("Div", w("Add", size, w.ints(*(n - 1 for n in windows.strides))), strides)
    spanned = w("Add", w("Mul", w("Sub", count, w.ints(1)), strides), w.ints(*windows.reaches))
    total = w("Max", w("Sub", spanned, size), w.ints(0))
    fewer = w("Div", total, w.ints(2))
    larger = w("Sub", total, fewer)
    begins, ends = (fewer, larger) if mode == "SAME_UPPER" else (larger, fewer)
    none = w.ints(0, 0)
    return begins, w("Pad", x, w("Concat", none, begins, none, ends, axis=0))


def cropped(w: Replacement, padded: str, first: str, x: str) -> str:
    """Remove the padding that `windows_of` added; returns `padded` itself if `first` is empty."""
    if not first:
        return padded
    axes = w.ints(*range(SPATIAL, SPATIAL + len(w.attribute("strides", []))))
    return w("Slice", padded, first, w("Add", first, w("Shape", x, start=SPATIAL)), axes)


def spread(w: Replacement, gradient: str, weight: str, windows: Windows, x: str, group: int = 1) -> str:
    """Sum over all windows of kernel times gradient, added at the window's position in the image `x`.

    `gradient` is [N, M, windows...], `weight` is [M, C/group, kernel...], and the result has the shape of `x`,
    [N, C, image...].
    """
    ends, missing, cut = [], [], False
    for axis, size in enumerate(windows.sizes):
        count, stride = windows.counts[axis], windows.strides[axis]
        if size is None or count is None:
            exact = stride == 1 and not windows.ceil
            ends.append(windows.ends[axis] if exact else 0)
            missing.append(0 if exact else stride - 1)
            cut = cut or not exact
        else:
            # Elements behind the last window belong to none, and have no gradient: `output_padding` adds zeros for
            # them.
            lacking = size + windows.begins[axis] - stride * (count - 1) - windows.reaches[axis]
            ends.append(max(0, -lacking))
            missing.append(max(0, lacking))
    extra: dict[str, Any] = {"output_padding": missing} if any(missing) else {}
    image_sum = w(
        "ConvTranspose",
        gradient,
        weight,
        group=group,
        kernel_shape=windows.kernel,
        strides=windows.strides,
        dilations=windows.dilations,
        pads=[*windows.begins, *ends],
        **extra,
    )
    if not cut:
        return image_sum
    axes = range(SPATIAL, SPATIAL + len(windows.kernel))
    return w("Slice", image_sum, w.ints(*(0 for _ in axes)), w("Shape", x, start=SPATIAL), w.ints(*axes))


def met(w: Replacement, padded: str, windows: Windows, place: Sequence[int], outputs: str) -> str:
    """The element of each window at one kernel position, [N, C, windows...]; `padded` is the image with its padding.

    `outputs` has the number of windows along each spatial axis.
    """
    if math.prod(windows.kernel) == 1 and all(stride == 1 for stride in windows.strides):
        return padded
    axes = range(SPATIAL, SPATIAL + len(windows.kernel))
    starts = [n * d for n, d in zip(place, windows.dilations, strict=True)]
    strides = windows.strides
    counts = windows.counts
    if None not in counts:
        ranges = zip(starts, counts, strides, strict=True)
        ends = w.ints(*(start + (count or 0) * stride - stride + 1 for start, count, stride in ranges))
    elif all(stride == 1 for stride in strides):
        ends = w("Add", w("Shape", outputs, start=SPATIAL), w.ints(*starts))
    else:
        spanned = w("Mul", w("Shape", outputs, start=SPATIAL), w.ints(*strides))
        ends = w("Add", spanned, w.ints(*(start - stride + 1 for start, stride in zip(starts, strides, strict=True))))
    steps = [] if all(stride == 1 for stride in strides) else [w.ints(*strides)]
    return w("Slice", padded, w.ints(*starts), ends, w.ints(*axes), *steps)
