"""The largest of each window of images, channels last, and the gradient; see pooling.cu.

MaxPool (x) -> y; MaxPoolGrad (dy, x, y) -> dx: the gradient of a window goes to its first largest element. The
attributes are those of ONNX's MaxPool. Values are [samples, height, width, channels]; y has the element type of x.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_void_p
from typing import Any

from ortflow.workflow.cuda.operators import Call, Tensor
from ortflow.workflow.cuda.source import blocks, source, vector
from ortflow.workflow.cuda.windows import AXES, Windows
from ortflow.workflow.errors import OrtflowError

_BLOCK = 256


class Sizes(ctypes.Structure):
    """The struct of pooling.cu."""

    _fields_ = (
        ("count", ctypes.c_int64), ("height", ctypes.c_int), ("width", ctypes.c_int), ("rows", ctypes.c_int),
        ("columns", ctypes.c_int), ("channels", ctypes.c_int),
    )  # fmt: skip


class _Node:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._windows = Windows.of(attributes)

    def _made(self, x: Tensor) -> tuple[int, int, int, int]:
        """The shape of y."""
        if len(x.shape) != AXES + 2:
            raise OrtflowError(f"a pooling of {list(x.shape)}")
        return x.shape[0], *self._windows.counts(x.shape[1:3]), x.shape[3]

    def _launch(
        self, call: Call, function: str, types: Mapping[str, tuple[int, int]], made: tuple[int, ...],
        x: Tensor, places: int,
    ) -> None:  # fmt: skip
        """`types`: name in the source -> pointer and element type; `places` is the number of threads' places."""
        channels = x.shape[3]
        lanes = vector(channels, types.values())
        windows = self._windows
        numbers = {
            "VECTOR": lanes, "PH": windows.kernel[0], "PW": windows.kernel[1], "SH": windows.strides[0],
            "SW": windows.strides[1], "DH": windows.dilations[0], "DW": windows.dilations[1], "TOP": windows.pads[0],
            "LEFT": windows.pads[1],
        }  # fmt: skip
        kinds = {"X": x.type, "Y": x.type, "G": x.type, "D": x.type} | {name: kind for name, (_, kind) in types.items()}
        text = source("pooling", tuple(kinds.items()), tuple(numbers.items()))
        count = places * (channels // lanes)
        sizes = Sizes(count, x.shape[1], x.shape[2], made[1], made[2], channels)
        call.launch(text, function, blocks(count, _BLOCK), _BLOCK, *(c_void_p(p) for p, _ in types.values()), sizes)


class MaxPool(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator."""
        x = call.given(0)
        made = self._made(x)
        y = call.output(0, made)
        if math.prod(made):
            values = {"X": (x.pointer, x.type), "Y": (y, call.types[0])}
            self._launch(call, "max_pool", values, made, x, math.prod(made[:3]))


class MaxPoolGrad(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if shapes do not match, or y has another element type than x."""
        dy, x, y = (call.given(place) for place in range(3))
        made = self._made(x)
        if dy.shape != made or y.shape != made or y.type != x.type:
            raise OrtflowError(f"a gradient of {list(dy.shape)} for a pooling of {list(x.shape)} to {list(y.shape)}")
        dx = call.output(0, x.shape)
        if math.prod(x.shape):
            values = {
                "G": (dy.pointer, dy.type), "X": (x.pointer, x.type), "Y": (y.pointer, y.type), "D": (dx, call.types[0])
            }  # fmt: skip
            self._launch(call, "max_pool_gradient", values, made, x, math.prod(x.shape[:3]))
