"""The sum of squares of a vector in a fixed order, for the norm of the gradient; see squares.cu.

SquareSum (x fp32 [n]) -> double [1].
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import size_of, source
from ortflow.workflow.errors import OrtflowError

_THREADS = 256
_RUN = 16
"""Elements per run, as in squares.cu."""
_BLOCKS = 1056
"""Largest number of blocks: the same on every GPU, so that the sum is bit-identical."""
_ALIGNED = 16


@operator()
class SquareSum:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if the vector is not aligned to 16 bytes."""
        x, out = call.given(0), call.output(0, (1,))
        if x.pointer % _ALIGNED:
            raise OrtflowError("the sum of squares of a vector that is not aligned to 16 bytes")
        # As nodes of ONNX it is two passes: one writes the squares, and cuDNN's reduction reads them.
        runs, rest = divmod(size_of(x), _RUN)
        blocks = max(1, min(_BLOCKS, -(-runs // _THREADS)))
        part = call.scratch(8 * blocks)
        text = source("squares", ())
        pointers = c_void_p(x.pointer), c_void_p(part)
        call.launch(text, "square_sum", blocks, _THREADS, *pointers, c_int64(runs), c_int64(rest))
        call.launch(text, "finish_squares", 1, _THREADS, c_void_p(part), c_void_p(out), c_int64(blocks))
