"""Sums over leading axes in a fixed order, for the gradients of biases; see sums.cu.

ColumnSums (x) -> the sum over all axes but the last, or over the first `axes`; x may be half, the sums are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.operators import Call
from ortflow.workflow.cuda.source import columns_of, source, vector

_BLOCKS = 1056
"""Number of blocks to aim at if there are enough rows: the same on every GPU, so that the sums are bit-identical."""
_ROWS_A_THREAD = 4
_THREADS = 256
_WARP = 32
_LARGEST_GRID_Y = 65_535


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
        lanes = vector(width, [(x.pointer, x.type)])
        columns = columns_of(width, lanes, 8)
        chunks = min(-(-_BLOCKS // columns.tiles), -(-rows // (columns.groups * _ROWS_A_THREAD)), _LARGEST_GRID_Y)
        chunks = max(1, chunks)
        part = call.scratch(4 * chunks * width) if chunks > 1 else out
        text = source("sums", (("X", x.type),), columns.numbers())
        grid = (columns.tiles, chunks)
        call.launch(
            text, "column_sums", grid, _THREADS, c_void_p(x.pointer), c_void_p(part), c_int64(rows), c_int64(width)
        )
        if chunks > 1:
            finish(call, part, chunks, width, out)


def finish(call: Call, part: int, count: int, width: int, out: int, behind: int = 0, split: int | None = None) -> None:
    """Launch the sum over the rows of fp32 part [count, width] into `out`; columns from `split` on go to `behind`."""
    text = source("sums", (("X", int(TensorProto.FLOAT)),), (("VECTOR", 1), ("LANES", _WARP), ("READS", 1)))
    numbers = c_int64(count), c_int64(width), c_int64(width if split is None else split)
    call.launch(text, "finish", -(-width // _WARP), 1024, *map(c_void_p, (part, out, behind)), *numbers)
