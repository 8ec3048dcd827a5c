"""Sums over axes in a fixed order; see sums.cu. x may be half, the results are fp32.

ColumnSums (x) -> the sum over all axes but the last, or over the first `axes`, for the gradients of biases. PixelMeans
(x [samples, height, width, channels]) -> the means over height and width [samples, 1, 1, channels].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import columns_of, source, vector
from ortflow.workflow.errors import OrtflowError

# An H100 or H200 has 132 multiprocessors of 2048 threads: 8 blocks each.
_BLOCKS = 1056
"""Largest number of blocks, if a row needs fewer: as many as a large GPU holds, and the same on every GPU, so that the
sums are bit-identical.
"""
_ROWS_A_THREAD = 4
_THREADS = 256
_WARP = 32
# CUDA's limit for the second axis of a grid.
_LARGEST_GRID_Y = 65_535
_FEW = 1024
"""Number of rows up to which one kernel sums them, as those that other kernels have summed in part."""


@operator(half_inputs=(0,))
class ColumnSums:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._axes = int(attributes.get("axes", -1))

    def run(self, call: Call) -> None:
        """The output has the remaining axes, and at least one."""
        x = call.given(0)
        axes = self._axes if self._axes >= 0 else len(x.shape) - 1
        rows, width = math.prod(x.shape[:axes]), math.prod(x.shape[axes:])
        out = call.output(0, x.shape[axes:])
        if not width:
            return
        if x.type == TensorProto.FLOAT and rows <= _FEW:
            finish(call, x.pointer, rows, width, out)
            return
        lanes = vector(width, [(x.pointer, x.type)])
        columns = columns_of(width, lanes, 8)
        # Not more: a few blocks that wait for all others would take as long again.
        chunks = min(_BLOCKS // columns.tiles, -(-rows // (columns.groups * _ROWS_A_THREAD)), _LARGEST_GRID_Y)
        chunks = max(1, chunks)
        part = call.scratch(4 * chunks * width) if chunks > 1 else out
        text = source("sums", (("X", x.type),), columns.numbers())
        grid = (columns.tiles, chunks)
        call.launch(
            text, "column_sums", grid, _THREADS, c_void_p(x.pointer), c_void_p(part), c_int64(rows), c_int64(width)
        )
        if chunks > 1:
            finish(call, part, chunks, width, out)


@operator(half_inputs=(0,))
class PixelMeans:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if there are no pixels."""
        x = call.given(0)
        samples, height, width, channels = x.shape
        out = call.output(0, (samples, 1, 1, channels))
        if not height * width:
            raise OrtflowError(f"the mean over the pixels of {list(x.shape)}")
        if not samples * channels:
            return
        # ONNX Runtime's ReduceMean took 160 us for ResNet-50's last image: two passes and a dozen kernels of single
        # numbers.
        columns = columns_of(channels, vector(channels, [(x.pointer, x.type)]), 8)
        call.launch(
            source("sums", (("X", x.type),), columns.numbers()), "column_means",
            (columns.tiles, min(samples, _LARGEST_GRID_Y)), _THREADS, c_void_p(x.pointer), c_void_p(out),
            *map(c_int64, (samples, height * width, channels)),
        )  # fmt: skip


def finish(call: Call, part: int, count: int, width: int, *outs: int) -> None:
    """Launch the sum over the rows of fp32 part [count, outs, width] into each of one to three outputs [width]."""
    text = source("sums", (("X", int(TensorProto.FLOAT)),), (("VECTOR", 1), ("LANES", _WARP), ("READS", 1)))
    pointers, all_ = (*outs, 0, 0)[:3], width * len(outs)
    numbers = c_int64(count), c_int64(all_), c_int64(width)
    call.launch(text, "finish", -(-all_ // _WARP), 1024, *map(c_void_p, (part, *pointers)), *numbers)
