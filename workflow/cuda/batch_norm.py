"""Normalisation by the statistics of a batch, channels last: what each channel is multiplied with.

BatchStatistics (x [..., channels], scale, bias, running mean?, running variance?) -> slope, offset, mean, variance,
1 / deviation, correction [], new running mean?, new running variance?: y = slope x + offset, and the unbiased variance
is correction variance. A running statistic becomes `momentum` times itself and `fresh` times the batch's, with the bits
of the nodes that `running` finds. See batch_norm.cu.

BatchGradients (dy, x, scale, mean, 1 / deviation, slope?, offset?) -> slope, factor, offset, dscale, dbias: dx = slope
dy + factor x + offset. With the slope and offset of BatchStatistics, dy is the gradient of a Relu's result, and counts
only where what the Relu reads is larger than zero. See batch_norm_gradient.cu.

BatchGradientsOfSum (one, x, scale, mean, 1 / deviation, other, y [..., channels]) -> slope, factor, offset, dscale,
dbias, dy: the same for dy = one + other where y is larger than zero, which is stored for its other readers.

All other outputs are fp32 [channels]; x, y and gradients may be half. Elementwise kernels compute y and dx, together
with their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.registry import operator
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
_TYPES = "X", "G", "OTHER", "Y", "DY"
"""Of x, the gradient, what is added to it, the Relu's result and their sum."""
# CUDA's limit for the second axis of a grid.
_LARGEST_GRID_Y = 65_535


@dataclass(frozen=True)
class _Sums:
    """How a kernel sums over rows: see batch_sums.cuh."""

    text: str
    grid: tuple[int, int]
    part: int
    arrived: int


def _sums(
    call: Call, name: str, images: Mapping[str, tuple[int, int]], rows: int, width: int, *, rectified: bool = False
) -> _Sums:
    """`images`: the pointer and element type of each, by the name of its type in the source."""
    lanes = vector(width, list(images.values()))
    columns = columns_of(width, lanes, 2, min(32, _TILE // lanes))
    most = min(BLOCKS // columns.tiles, _CHUNKS * _TILE // columns.tile, _LARGEST_GRID_Y)
    chunks = max(1, min(most, -(-rows // (columns.groups * ROWS_A_THREAD))))
    of_x = images["X"][1]
    types = tuple((key, images.get(key, (0, of_x))[1]) for key in _TYPES)
    modes = ("GRADIENT", int("G" in images)), ("RECTIFIED", int(rectified)), ("ADDED", int("OTHER" in images))
    text = source(name, types, (*columns.numbers(), *modes))
    part = call.scratch(4 * 2 * columns.tile * chunks * columns.tiles)
    return _Sums(text, (columns.tiles, chunks), part, call.counters(columns.tiles))


def _sizes(x: Tensor, vectors: Sequence[Tensor]) -> tuple[int, int]:
    rows, width = rows_and_width(x)
    if not rows * width or any(vector.shape != (width,) for vector in vectors):
        raise OrtflowError(f"a normalisation of {list(x.shape)} with {[list(vector.shape) for vector in vectors]}")
    return rows, width


@operator(half_inputs=(0,))
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
        results = [*(call.output(place, (width,)) for place in range(5)), call.output(5, ())]
        running = [
            *(tensor.pointer for tensor in old),
            *(call.output(6 + place, (width,)) for place in range(len(old))),
        ]
        sums = _sums(call, "batch_norm", {"X": (x.pointer, x.type)}, rows, width)
        pointers = (
            *(tensor.pointer for tensor in (x, scale, bias)),
            sums.part,
            sums.arrived,
            *results,
            *(running or [0] * 4),
        )
        numbers = *map(c_float, (self._epsilon, self._momentum, self._fresh)), c_int64(rows), c_int64(width)
        call.launch(sums.text, "batch_statistics", sums.grid, _THREADS, *map(c_void_p, pointers), *numbers)


@operator(half_inputs=(0, 1))
class BatchGradients:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator."""
        dy, x, scale, mean, inverse, *of_relu = (call.given(place) for place in range(len(call.inputs)))
        rows, width = _sizes(x, (scale, mean, inverse, *of_relu))
        _same_shape(x, dy)
        results = [call.output(place, (width,)) for place in range(5)]
        images = {"X": (x.pointer, x.type), "G": (dy.pointer, dy.type)}
        sums = _sums(call, "batch_norm_gradient", images, rows, width, rectified=bool(of_relu))
        pointers = [tensor.pointer for tensor in (x, dy, scale, mean, inverse, *of_relu)]
        _launch(call, sums, [*pointers, *([] if of_relu else [0, 0]), 0, 0, 0], results, rows, width)


@operator(half_inputs=(0, 1, 5, 6), half_outputs=(5,))
class BatchGradientsOfSum:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator."""
        gradient, x, scale, mean, inverse, other, y = (call.given(place) for place in range(7))
        rows, width = _sizes(x, (scale, mean, inverse))
        _same_shape(x, gradient, other, y)
        results, dy = [call.output(place, (width,)) for place in range(5)], call.output(5, x.shape)
        images = {
            key: (tensor.pointer, tensor.type) for key, tensor in zip(_TYPES, (x, gradient, other, y), strict=False)
        }
        images["DY"] = dy, call.types[5]
        sums = _sums(call, "batch_norm_gradient", images, rows, width)
        pointers = [tensor.pointer for tensor in (x, gradient, scale, mean, inverse)]
        _launch(call, sums, [*pointers, 0, 0, other.pointer, y.pointer, dy], results, rows, width)


def _same_shape(x: Tensor, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.shape != x.shape:
            raise OrtflowError(f"the gradient is {list(tensor.shape)}, and what was normalised {list(x.shape)}")


def _launch(call: Call, sums: _Sums, sources: Sequence[int], targets: Sequence[int], rows: int, width: int) -> None:
    pointers = *sources, sums.part, sums.arrived, *targets
    numbers = c_int64(rows), c_int64(width)
    call.launch(sums.text, "batch_gradients", sums.grid, _THREADS, *map(c_void_p, pointers), *numbers)
