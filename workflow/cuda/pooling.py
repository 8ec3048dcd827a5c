"""The largest of each window of images, channels last, and the gradient; see pooling.cu.

MaxPool (x) -> y, places (optional): the number, u8, of the element in its window that the gradient goes to, the first
largest one. MaxPoolGrad (dy, places) -> dx. The attributes are those of ONNX's MaxPool, and for the gradient `sizes`,
height and width of x. Values are [samples, height, width, channels]; y has the element type of x.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import blocks, source, vector
from ortflow.workflow.cuda.windows import AXES, Windows
from ortflow.workflow.errors import OrtflowError

_BLOCK = 256
NOWHERE = 255
"""The place in a window that has no element; windows have at most so many elements."""


class Sizes(ctypes.Structure):
    """The struct of pooling.cu."""

    _fields_ = (
        ("count", ctypes.c_int64), ("height", ctypes.c_int), ("width", ctypes.c_int), ("rows", ctypes.c_int),
        ("columns", ctypes.c_int), ("channels", ctypes.c_int),
    )  # fmt: skip


class _Node:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._windows = Windows.of(attributes)

    def _made(self, image: Sequence[int]) -> tuple[int, int, int, int]:
        """The shape of y."""
        if len(image) != AXES + 2 or math.prod(self._windows.kernel) > NOWHERE:
            raise OrtflowError(f"a pooling of {list(image)} by {list(self._windows.kernel)}")
        return image[0], *self._windows.counts(image[1:3]), image[3]

    def _launch(
        self, call: Call, function: str, types: Mapping[str, tuple[int, int]], pointers: Sequence[int],
        image: Sequence[int], made: Sequence[int], of_image: bool,
    ) -> None:  # fmt: skip
        """`types`: name in the source -> pointer and element type. A thread has a place `of_image`, or of `made`."""
        channels = image[3]
        lanes = vector(channels, types.values())
        windows = self._windows
        numbers = {
            "VECTOR": lanes, "PH": windows.kernel[0], "PW": windows.kernel[1], "SH": windows.strides[0],
            "SW": windows.strides[1], "DH": windows.dilations[0], "DW": windows.dilations[1], "TOP": windows.pads[0],
            "LEFT": windows.pads[1], "NOWHERE": NOWHERE,
        }  # fmt: skip
        kinds = dict.fromkeys("XYGD", TensorProto.FLOAT) | {name: kind for name, (_, kind) in types.items()}
        text = source("pooling", tuple(kinds.items()), tuple(numbers.items()))
        count = math.prod((image if of_image else made)[:3]) * (channels // lanes)
        if count:
            sizes = Sizes(count, image[1], image[2], made[1], made[2], channels)
            call.launch(text, function, blocks(count, _BLOCK), _BLOCK, *map(c_void_p, pointers), sizes)


@operator(half_inputs=(0,), half_outputs=(0,), half_only=True)
class MaxPool(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator."""
        x = call.given(0)
        pooled = self._made(x.shape)
        # Without the places, the gradient searched the windows again: 950 us of ResNet-50's step of 25 ms.
        y, places = call.output(0, pooled), call.output(1, pooled) if len(call.types) > 1 else 0
        values = {"X": (x.pointer, x.type), "Y": (y, call.types[0])}
        self._launch(call, "max_pool", values, (x.pointer, y, places), x.shape, pooled, of_image=False)


@operator(half_inputs=(0,), half_outputs=(0,), half_only=True)
class MaxPoolGrad(_Node):
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__(attributes)
        self._sizes = [int(size) for size in attributes["sizes"]]

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if shapes do not match."""
        dy, places = call.given(0), call.given(1)
        image = (dy.shape[0], *self._sizes, dy.shape[-1])
        pooled = self._made(image)
        if dy.shape != pooled or places.shape != pooled:
            raise OrtflowError(f"a gradient of {list(dy.shape)} for a pooling of {list(image)} to {list(places.shape)}")
        dx = call.output(0, image)
        values = {"G": (dy.pointer, dy.type), "D": (dx, call.types[0])}
        pointers = dy.pointer, places.pointer, dx
        self._launch(call, "max_pool_gradient", values, pointers, image, pooled, of_image=True)
