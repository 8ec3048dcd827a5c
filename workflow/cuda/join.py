"""Values side by side along an axis, as by ONNX's Concat; see join.cu.

Join (x, ...) -> y, with the attribute `axis`; all of one element type. ONNX Runtime's Concat of values of different
sizes copies tables from the host in each run, which a CUDA graph cannot contain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import size_of, source, vector
from ortflow.workflow.errors import OrtflowError

_BLOCK, _LARGEST_GRID = 256, 8192


@operator()
class Join:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._axis = int(attributes["axis"])

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if shapes or types do not match."""
        values = [call.given(place) for place in range(len(call.inputs))]
        first = values[0]
        axis = self._axis % len(first.shape)
        layouts = {(tensor.type, tensor.shape[:axis], tensor.shape[axis + 1 :], len(tensor.shape)) for tensor in values}
        if len(layouts) != 1 or call.types[0] != first.type:
            raise OrtflowError(
                f"values of {[list(tensor.shape) for tensor in values]} cannot be joined along axis {axis}"
            )
        length = sum(tensor.shape[axis] for tensor in values)
        out = call.output(0, (*first.shape[:axis], length, *first.shape[axis + 1 :]))
        rows, inner, offset = math.prod(first.shape[:axis]), math.prod(first.shape[axis + 1 :]), 0
        joined = length * inner
        for tensor in values:
            width = tensor.shape[axis] * inner
            if rows * width:
                steps = math.gcd(width, joined, offset)
                lanes = vector(steps, [(tensor.pointer, tensor.type), (out, tensor.type)])
                text = source("join", (("X", tensor.type),), (("VECTOR", lanes),))
                grid = min(-(-size_of(tensor) // (lanes * _BLOCK)), _LARGEST_GRID)
                call.launch(
                    text, "join", grid, _BLOCK, c_void_p(tensor.pointer), c_void_p(out),
                    *map(c_int64, (rows, width, joined, offset)),
                )  # fmt: skip
            offset += width
