"""The gradient of a table look-up in a fixed order; see embedding.cu.

TableGrad (indices, gradient, addend [rows, width]?) -> the table's gradient [rows, width]: for each row the sum of the
gradients at its indices, which may count from the end, and of the addend's row. `rows` is an attribute. The gradients
and the addend may be half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from itertools import accumulate
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import blocks, columns_of, size_of, source, vector
from ortflow.workflow.errors import OrtflowError

_DIGIT = 10
"""Bits of an index that a sorting pass uses, at most: the counts must fit into shared memory."""
_THREADS = 512
CHUNKS = 256
"""Largest number of sorting blocks: each reads the counts of all."""
_SHORTEST_RUN = 32
_ALIGNED = 256


@operator(half_inputs=(1, 2), half_outputs=(0,))
class TableGrad:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._height = int(attributes["rows"])

    def run(self, call: Call) -> None:
        """An index outside the table makes the whole gradient NaN."""
        indices, gradient = call.given(0), call.given(1)
        entries, height = size_of(indices), self._height
        width = gradient.shape[-1] if gradient.shape else 0
        if size_of(gradient) != entries * width:
            raise OrtflowError(f"indices are {list(indices.shape)}, and their gradient {list(gradient.shape)}")
        if max(entries, height) >= 2**31 - _THREADS:
            raise OrtflowError(f"{entries:,} indices of {height:,} rows are more than a kernel takes")
        addend = call.inputs[2] if len(call.inputs) > 2 else None
        if addend is not None and addend.shape != (height, width):
            raise OrtflowError(
                f"the table is {[height, width]}, and what is added to its gradient {list(addend.shape)}"
            )
        table = call.output(0, (height, width))
        if not height * width:
            return
        bits, run = height.bit_length(), max(_SHORTEST_RUN, 1 << (math.isqrt(max(entries, 1) - 1)).bit_length())
        passes = -(-bits // _DIGIT)
        digit = -(-bits // passes)
        chunk = _THREADS * max(1, -(-entries // (_THREADS * CHUNKS)))
        chunks = -(-entries // chunk)
        kinds = [(gradient.pointer, gradient.type), (table, call.types[0])]
        kinds += [(addend.pointer, addend.type)] if addend else []
        columns = columns_of(width, vector(width, kinds), 32)
        numbers = (*columns.numbers(), ("BITS", digit), ("ADDS", int(addend is not None)))
        types = ("G", gradient.type), ("D", call.types[0]), ("A", addend.type if addend else gradient.type)
        text = source("embedding", types, numbers)
        sizes = [4 * entries] * 4 + [4 * chunks << digit, 4 * (height + 1), 4 * (entries // run) * width]
        ends = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        scratch = call.scratch(ends[-1])
        keys, other_keys, at, other_at, counts, starts, part = (scratch + end for end in ends[:-1])

        def launch(function: str, grid: Any, block: int, pointers: tuple[int, ...], *rest: Any) -> None:
            call.launch(text, function, grid, block, *map(c_void_p, pointers), *rest)

        sorting = c_int64(entries), c_int64(chunk), c_int64(height)
        for number in range(passes if entries else 0):
            index, read, read_at = (0, other_keys, other_at) if number else (indices.pointer, 0, 0)
            shift = c_int(number * digit)
            launch("count", chunks, _THREADS, (index, read, counts), *sorting, shift)
            launch("scatter", chunks, _THREADS, (index, read, read_at, counts, keys, at), *sorting, shift)
            keys, other_keys, at, other_at = other_keys, keys, other_at, at
        keys, at = other_keys, other_at
        launch("bounds", blocks(height + 1, 256), 256, (keys, starts), c_int64(entries), c_int64(height))
        if entries >= run:
            sources = keys, at, gradient.pointer, part
            launch("runs", (entries // run, columns.tiles), 256, sources, c_int64(width), c_int(run))
        pointers = keys, at, starts, gradient.pointer, part, addend.pointer if addend else 0, table
        sizes_ = c_int64(entries), c_int64(height), c_int64(width), c_int(run)
        launch("rows", (blocks(height, columns.groups), columns.tiles), 256, pointers, *sizes_)
