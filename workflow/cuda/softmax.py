"""Softmax over the last axis with the scale and mask before it, and its gradient with the scale after it.

Softmax (x, mask?) -> softmax(x scale + mask), where both are broadcast to each other; SoftmaxGrad (dy, y) -> dx scale.
All values may be half. See softmax.cu and softmax_gradient.cu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from itertools import zip_longest
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import blocks, rows_and_width, rows_of, source, vector
from ortflow.workflow.cuda.spread import AXES, leading_axes, spread_of
from ortflow.workflow.errors import OrtflowError

_FLOAT = int(TensorProto.FLOAT)


class _Scaled:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._scale = c_float(float(attributes.get("scale", 1.0)))


@operator(half_inputs=(0, 1), half_outputs=(0,))
class Softmax(_Scaled):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """The output has the shape to which input and mask are broadcast."""
        x = call.given(0)
        mask = call.inputs[1] if len(call.inputs) > 1 else None
        shape = spread_shape(x.shape, mask.shape if mask else ())
        rows, width = math.prod(shape[:-1]), shape[-1]
        y = call.output(0, shape)
        if not rows * width:
            return
        axes = leading_axes(shape, x.shape, mask.shape if mask else ())
        if len(axes) > AXES or rows >= 2**32:
            raise OrtflowError(f"a softmax of shape {list(shape)} is more than a kernel takes")
        is_full = [bool(tensor) and _is_whole(tensor.shape, width) for tensor in (x, mask) if tensor is not None]
        read = [tensor for tensor, is_whole in zip((x, mask), is_full, strict=False) if tensor is not None and is_whole]
        layout = rows_of(
            width, vector(width, [(tensor.pointer, tensor.type) for tensor in read] + [(y, call.types[0])])
        )
        text = source(
            "softmax",
            (("X", x.type), ("M", mask.type if mask else _FLOAT), ("Y", call.types[0])),
            (
                *layout.numbers(width), ("MASKED", int(mask is not None)), ("X_WHOLE", int(is_full[0])),
                ("M_WHOLE", int(is_full[-1])),
            ),
        )  # fmt: skip
        pointers = x.pointer, mask.pointer if mask else 0, y
        call.launch(
            text, "softmax", blocks(rows, layout.at_a_time), layout.block,
            *map(c_void_p, pointers), spread_of(axes), self._scale, c_int(len(axes)), c_int64(rows),
        )  # fmt: skip


@operator(half_inputs=(0, 1), half_outputs=(0,))
class SoftmaxGrad(_Scaled):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """The output has the shape of both inputs."""
        dy, y = call.given(0), call.given(1)
        if dy.shape != y.shape:
            raise OrtflowError(f"the gradient is {list(dy.shape)}, and the softmax {list(y.shape)}")
        rows, width = rows_and_width(y)
        dx = call.output(0, y.shape)
        if not rows * width:
            return
        tensors: Sequence[Tensor] = dy, y
        layout = rows_of(
            width,
            vector(width, [*((tensor.pointer, tensor.type) for tensor in tensors), (dx, call.types[0])]),
            widest=512,
        )
        text = source("softmax_gradient", (("G", dy.type), ("Y", y.type), ("D", call.types[0])), layout.numbers(width))
        pointers = dy.pointer, y.pointer, dx
        call.launch(
            text, "softmax_gradient", blocks(rows, layout.at_a_time), layout.block,
            *map(c_void_p, pointers), self._scale, c_int64(rows),
        )  # fmt: skip


def spread_shape(x: Sequence[int], mask: Sequence[int]) -> tuple[int, ...]:
    """The shape to which both are broadcast, as in numpy. Raises OrtflowError if they do not match."""
    pairs = list(zip_longest(reversed(x), reversed(mask), fillvalue=1))
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        raise OrtflowError(f"scores are {list(x)}, and the mask {list(mask)}")
    return tuple(b if a == 1 else a for a, b in reversed(pairs))


def _is_whole(shape: Sequence[int], width: int) -> bool:
    return bool(shape) and shape[-1] == width
