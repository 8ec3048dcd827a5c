"""Normalisation by the statistics of a batch, channels last: what each channel is multiplied with.

BatchStatistics (x [..., channels], scale, bias, running mean?, running variance?) -> slope, offset, mean, variance,
1 / deviation, correction [], new running mean?, new running variance?: y = slope x + offset, and the unbiased variance
is correction variance. A running statistic becomes `momentum` times itself and `fresh` times the batch's, with the bits
of the nodes that `running` finds. See batch_norm.cu.

BatchGradients (dy, x, scale, mean, 1 / deviation, slope?, offset?) -> slope, factor, offset, dscale, dbias: dx = slope
dy + factor x + offset. With the slope and offset of BatchStatistics, dy is the gradient of a Relu's result, and counts
only where what the Relu reads is larger than zero. See batch_norm_gradient.cu.

All other outputs are fp32 [channels]; x and dy may be half. Elementwise kernels compute y and dx, together with their
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.cuda.operators import Call, Tensor
from ortflow.workflow.cuda.source import columns_of, rows_and_width, source, vector
from ortflow.workflow.errors import OrtflowError

_EPSILON = 1e-5
BLOCKS = 528
"""Number of blocks to aim at if there are enough rows, all of which a large GPU holds at a time: the same on every GPU,
so that the sums are bit-identical.
"""
_TILE = 64
"""Columns of a block: 128 bytes of halves."""
_CHUNKS = 264
"""The most chunks of rows whose sums one block adds up, for a whole tile."""
ROWS_A_THREAD = 4
_THREADS = 256
_LARGEST_GRID_Y = 65_535


@dataclass(frozen=True)
class _Sums:
    """How a kernel sums over rows: see batch_sums.cuh."""

    text: str
    grid: tuple[int, int]
    part: int
    arrived: int


def _sums(
    call: Call, name: str, x: Tensor, dy: Tensor | None, rows: int, width: int, *, rectified: bool = False
) -> _Sums:
    lanes = vector(width, [(x.pointer, x.type), *([(dy.pointer, dy.type)] if dy is not None else [])])
    columns = columns_of(width, lanes, 2, min(32, _TILE // lanes))
    most = min(BLOCKS // columns.tiles, _CHUNKS * _TILE // columns.tile, _LARGEST_GRID_Y)
    chunks = max(1, min(most, -(-rows // (columns.groups * ROWS_A_THREAD))))
    types = ("X", x.type), ("G", dy.type if dy is not None else x.type)
    modes = ("GRADIENT", int(dy is not None)), ("RECTIFIED", int(rectified))
    text = source(name, types, (*columns.numbers(), *modes))
    part = call.scratch(4 * 2 * columns.tile * chunks * columns.tiles)
    return _Sums(text, (columns.tiles, chunks), part, call.counters(columns.tiles))


def _sizes(x: Tensor, vectors: Sequence[Tensor]) -> tuple[int, int]:
    rows, width = rows_and_width(x)
    if not rows * width or any(each.shape != (width,) for each in vectors):
        raise OrtflowError(f"a normalisation of {list(x.shape)} with {[list(each.shape) for each in vectors]}")
    return rows, width


class BatchStatistics:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._epsilon = float(attributes.get("epsilon", _EPSILON))
        self._momentum, self._fresh = (float(attributes.get(name, 0)) for name in ("momentum", "fresh"))

    def run(self, call: Call) -> None:
        """See Operator."""
        x, scale, bias = (call.given(place) for place in range(3))
        old = [call.given(place) for place in range(3, len(call.inputs))]
        rows, width = _sizes(x, (scale, bias, *old))
        made = [*(call.output(place, (width,)) for place in range(5)), call.output(5, ())]
        running = [*(each.pointer for each in old), *(call.output(6 + place, (width,)) for place in range(len(old)))]
        sums = _sums(call, "batch_norm", x, None, rows, width)
        pointers = (*(each.pointer for each in (x, scale, bias)), sums.part, sums.arrived, *made, *(running or [0] * 4))
        numbers = *map(c_float, (self._epsilon, self._momentum, self._fresh)), c_int64(rows), c_int64(width)
        call.launch(sums.text, "batch_statistics", sums.grid, _THREADS, *map(c_void_p, pointers), *numbers)


class BatchGradients:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator."""
        dy, x, scale, mean, inverse, *of_relu = (call.given(place) for place in range(len(call.inputs)))
        rows, width = _sizes(x, (scale, mean, inverse, *of_relu))
        if dy.shape != x.shape:
            raise OrtflowError(f"the gradient is {list(dy.shape)}, and what was normalised {list(x.shape)}")
        made = [call.output(place, (width,)) for place in range(5)]
        sums = _sums(call, "batch_norm_gradient", x, dy, rows, width, rectified=bool(of_relu))
        given = [each.pointer for each in (x, dy, scale, mean, inverse, *of_relu)]
        pointers = (*given, *([] if of_relu else [0, 0]), sums.part, sums.arrived, *made)
        numbers = c_int64(rows), c_int64(width)
        call.launch(sums.text, "batch_gradients", sums.grid, _THREADS, *map(c_void_p, pointers), *numbers)
