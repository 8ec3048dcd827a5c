"""Convolution and pooling in numpy, in double precision, over any number of axes: the references for `images`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Double = npt.NDArray[np.float64]


def windows(
    x: npt.NDArray[Any],
    kernel: Sequence[int],
    *,
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int] | None = None,
    fill: float = 0.0,
) -> Double:
    """The elements under a kernel at each position: [batch, channels, *places, *kernel]; pads in ONNX's order."""
    axes = len(kernel)
    dilations = dilations or [1] * axes
    padding = [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)]
    padded = np.pad(x.astype(np.float64), padding, constant_values=fill)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=tuple(range(2, 2 + axes)))
    selection = (slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations)))
    return np.asarray(view[selection])


def convolution(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    *,
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int] | None = None,
    group: int = 1,
) -> Double:
    """Conv without a bias; `weight` is [out, in / group, *kernel]."""
    kernel, outs = weight.shape[2:], len(weight) // group
    patches = windows(x, kernel, pads=pads, strides=strides, dilations=dilations)
    ins, axes = weight.shape[1], len(kernel)
    parts = []
    for g in range(group):
        part, filters = patches[:, g * ins : (g + 1) * ins], weight[g * outs : (g + 1) * outs].astype(np.float64)
        behind = tuple(range(part.ndim - axes, part.ndim))
        parts.append(np.moveaxis(np.tensordot(part, filters, ((1, *behind), tuple(range(1, filters.ndim)))), -1, 1))
    return np.concatenate(parts, axis=1)


def transposed(
    y: npt.NDArray[Any], weight: npt.NDArray[Any], *, pads: Sequence[int], strides: Sequence[int], group: int,
    extra: Sequence[int],
) -> Double:  # fmt: skip
    """ConvTranspose: each element adds its multiple of the kernel. `weight` is [in, out / group, *kernel]."""
    axes, ins, outs = y.ndim - 2, y.shape[1] // group, weight.shape[1]
    sizes = [(n - 1) * s + k + e for n, s, k, e in zip(y.shape[2:], strides, weight.shape[2:], extra, strict=True)]
    total = np.zeros((len(y), outs * group, *sizes))
    for place in np.ndindex(*y.shape[2:]):
        reach = tuple(slice(p * s, p * s + k) for p, s, k in zip(place, strides, weight.shape[2:], strict=True))
        for g in range(group):
            read = (slice(None), slice(g * ins, (g + 1) * ins), *place)
            added = (slice(None), slice(g * outs, (g + 1) * outs), *reach)
            filters = weight[g * ins : (g + 1) * ins].astype(np.float64)
            total[added] += np.tensordot(y[read].astype(np.float64), filters, (1, 0))
    inner = (slice(a, n - b) for a, b, n in zip(pads[:axes], pads[axes:], sizes, strict=True))
    crop = (slice(None), slice(None), *inner)
    return np.asarray(total[crop])


def pooled(patches: Double, axes: int, reduce: Callable[..., Any]) -> Double:
    """Apply `reduce` to the elements of each window."""
    return np.asarray(reduce(patches, axis=tuple(range(patches.ndim - axes, patches.ndim))), np.float64)
