"""How two values lie under the leading axes of a result: kernels find rows by strides; see spread.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

AXES = 8


class Spread(ctypes.Structure):
    """As in spread.cuh."""

    _fields_ = (("sizes", ctypes.c_uint * AXES), ("of_x", c_int64 * AXES), ("of_mask", c_int64 * AXES))


def leading_axes(shape: Sequence[int], x: Sequence[int], mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """`merged_axes` of values of the shapes `x` and `mask`, which are broadcast to `shape`."""
    return merged_axes(shape, *(strides_of(operand, len(shape)) for operand in (x, mask)))


def merged_axes(shape: Sequence[int], x: Sequence[int], mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """(size, stride of x, stride of the mask) of all axes but the last; axes that are contiguous in both are merged."""
    axes: list[tuple[int, int, int]] = []
    for size, of_x, of_mask in zip(shape[:-1], x[:-1], mask[:-1], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == (of_x * size, of_mask * size):
            axes[-1] = (axes[-1][0] * size, of_x, of_mask)
        else:
            axes.append((size, of_x, of_mask))
    return axes


def spread_of(axes: Sequence[tuple[int, int, int]]) -> Spread:
    """`merged_axes` as kernels read them; AXES at most."""
    spread = Spread()
    for place, sizes in enumerate(axes):
        spread.sizes[place], spread.of_x[place], spread.of_mask[place] = sizes
    return spread


def strides_of(shape: Sequence[int], rank: int) -> list[int]:
    """Stride of each axis of a value that is broadcast to `rank` axes, in elements; 0 for an axis of length 1."""
    padded, strides, step = [1] * (rank - len(shape)) + list(shape), [0] * rank, 1
    for axis in reversed(range(rank)):
        strides[axis] = step if padded[axis] != 1 else 0
        step *= padded[axis]
    return strides
