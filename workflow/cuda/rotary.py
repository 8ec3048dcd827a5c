"""Rotary positions and their gradient; see rotary.cu.

Rotary (x, cosines, sines) -> y; RotaryGrad (dy, cosines, sines) -> dx. As the CPU operators of the same names
(`ortflow.workflow.kernels.rotary`). x and y, and their gradients, may each be half; cosines and sines are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any, ClassVar

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import LARGEST_GRID, source, vector
from ortflow.workflow.cuda.spread import AXES, merged_axes, spread_of, strides_of
from ortflow.workflow.errors import OrtflowError

_BLOCK = 256


@operator(half_inputs=(0,), half_outputs=(0,))
class Rotary:
    """See the module's docstring."""

    backward: ClassVar[bool] = False

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._tokens_first = bool(attributes.get("tokens_first", 0))

    def run(self, call: Call) -> None:
        """The output has the input's shape, heads and tokens swapped with `tokens_first`."""
        x, cosine, sine = (call.given(place) for place in range(3))
        if not x.shape or x.shape[-1] % 2 or (self._tokens_first and len(x.shape) != 4):
            raise OrtflowError(f"rotary positions of a value {list(x.shape)}")
        swapped = _swapped(x.shape) if self._tokens_first else list(x.shape)
        heads_first = list(x.shape) if self.backward else swapped
        table = cosine.shape
        if sine.shape != table or not _fits(table, heads_first):
            raise OrtflowError(f"cosines {list(table)} and sines {list(sine.shape)} for a value {list(heads_first)}")
        y = call.output(0, swapped)
        count = math.prod(x.shape)
        if not count:
            return
        rank = len(heads_first)
        of_value = strides_of(heads_first, rank)
        if self._tokens_first:
            of_value = _swapped(strides_of(_swapped(heads_first), rank))
        axes = merged_axes(heads_first, of_value, strides_of(table, rank))
        half = x.shape[-1] // 2
        tables = [(tensor.pointer, tensor.type) for tensor in (cosine, sine)]
        lanes = min(4, vector(half, [(x.pointer, x.type), (y, call.types[0]), *tables]))
        if len(axes) > AXES or count // (2 * half) >= 2**32 or any(kind != TensorProto.FLOAT for _, kind in tables):
            raise OrtflowError(f"rotary positions of a value {list(x.shape)} are more than a kernel takes")
        numbers = ("HALF", half), ("VECTOR", lanes), ("BACKWARD", int(self.backward))
        text = source("rotary", (("X", x.type), ("Y", call.types[0])), numbers)
        threads = count // (2 * lanes)
        call.launch(
            text, "rotary", min(-(-threads // _BLOCK), LARGEST_GRID), _BLOCK,
            *map(c_void_p, (x.pointer, cosine.pointer, sine.pointer, y)), spread_of(axes), c_int(len(axes)),
            c_int64(threads),
        )  # fmt: skip


@operator(half_inputs=(0,), half_outputs=(0,))
class RotaryGrad(Rotary):
    """See the module's docstring."""

    backward = True


def _swapped(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[2], sizes[1], *sizes[3:]]


def _fits(table: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a table is broadcast to a shape and has its last axis."""
    missing = len(shape) - len(table)
    return (
        missing >= 0
        and bool(table)
        and table[-1] == shape[-1]
        and all(size in (1, full) for size, full in zip(table, shape[missing:], strict=True))
    )
