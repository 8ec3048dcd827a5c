"""Tensors of different sizes one behind the other: Concat by copies on the GPU.

ONNX Runtime's kernel for it reads tables that the host copies for each run, so it cannot be captured in a CUDA graph.

Join (values fp32, fp16 or bf16, of one type...) -> them along `axis`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ortflow.workflow.cuda.operators import Call
from ortflow.workflow.cuda.source import BYTES
from ortflow.workflow.errors import OrtflowError


class Join:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._axis = int(attributes["axis"])

    def run(self, call: Call) -> None:
        """Raises OrtflowError for shapes that do not fit each other."""
        values = [call.given(place) for place in range(len(call.inputs))]
        first = values[0]
        axis = self._axis % len(first.shape)
        rests = {(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values}
        if len(rests) > 1 or len({len(value.shape) for value in values}) > 1:
            raise OrtflowError(f"{[list(value.shape) for value in values]} are not joined along axis {axis}")
        length = sum(value.shape[axis] for value in values)
        out = call.output(0, (*first.shape[:axis], length, *first.shape[axis + 1 :]))
        rows, step = math.prod(first.shape[:axis]), math.prod(first.shape[axis + 1 :]) * BYTES[first.type]
        start = out
        for value in values:
            width = value.shape[axis] * step
            if rows * width:
                call.copy_rows(start, length * step, value.pointer, width, rows)
            start += width
