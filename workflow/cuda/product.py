"""Products of half-precision matrices by cuBLASLt, as in linear layers and their gradients.

Product (a [..., k], b [k, n], bias fp16 or bf16 [n]?, residual?) -> a b + bias + residual, [..., n], of a's element
type or fp32. `turn_a`: a is [k, rows], with two axes; `turn_b`: b is [n, k]. The residual is of the result's type, and
has width n; its other axes are broadcast to those of the product, or these to its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.lt import TYPES, WORKSPACE, Place, Shape, library
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import BYTES, LARGEST_GRID, source
from ortflow.workflow.cuda.spread import AXES, leading_axes, spread_of
from ortflow.workflow.errors import OrtflowError

_ALIGNED, _THREADS = 256, 256
_HALVES = TYPES.keys() - {int(TensorProto.FLOAT)}


@operator()
class Product:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._turns = bool(attributes.get("turn_a", 0)), bool(attributes.get("turn_b", 0))

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if shapes or types do not match."""
        a, b = call.given(0), call.given(1)
        bias, residual = (call.inputs[place] if len(call.inputs) > place else None for place in (2, 3))
        shape, dims = shape_of(a, b, bias, call.types[0], *self._turns)
        if not shape.depth and shape.rows * shape.columns:
            raise OrtflowError(f"a product of {list(a.shape)} and {list(b.shape)} sums nothing")
        if residual is not None and residual.type != shape.result:
            raise OrtflowError("a residual of another element type than the product's result")
        pointers = a.pointer, b.pointer, bias.pointer if bias else 0
        if residual is None or residual.shape == dims:
            out = call.output(0, dims)
            if shape.rows * shape.columns:
                self._multiply(
                    call, shape, *pointers, residual.pointer if residual else 0, out, call.scratch(WORKSPACE)
                )
            return
        size = -(-BYTES[shape.result] * shape.rows * shape.columns // _ALIGNED) * _ALIGNED
        scratch = call.scratch(size + WORKSPACE)
        if shape.rows * shape.columns:
            self._multiply(call, shape, *pointers, 0, scratch, scratch + size)
        spread_sum(call, Tensor(scratch, dims, shape.result), residual)

    def _multiply(
        self, call: Call, shape: Shape, a: int, b: int, bias: int, residual: int, out: int, workspace: int
    ) -> None:
        place = Place(a, b, out, bias, workspace, call.stream, residual)
        library(call.gpu).run(replace(shape, residual=bool(residual)), place, measures=not call.captured)


def spread_sum(call: Call, first: Tensor, other: Tensor) -> None:
    """Output 0 is the sum of two tensors of equal width, broadcast to each other; see spread_sum.cu.

    Raises OrtflowError if their shapes do not match.
    """
    try:
        shape = np.broadcast_shapes(first.shape, other.shape)
    except ValueError:
        shape = ()
    if not shape or first.shape[-1] != other.shape[-1]:
        raise OrtflowError(f"a product of shape {list(first.shape)} and a residual of shape {list(other.shape)}")
    out, axes, count = call.output(0, shape), leading_axes(shape, first.shape, other.shape), math.prod(shape)
    if len(axes) > AXES:
        raise OrtflowError(f"a sum of shape {list(shape)} is more than a kernel takes")
    if not count:
        return
    text = source("spread_sum", (("X", first.type), ("M", other.type), ("Y", call.types[0])), (("WIDTH", shape[-1]),))
    blocks = min(-(-count // _THREADS), LARGEST_GRID)
    pointers = map(c_void_p, (first.pointer, other.pointer, out))
    call.launch(text, "spread_sum", blocks, _THREADS, *pointers, spread_of(axes), c_int(len(axes)), c_int64(count))


def shape_of(
    a: Tensor, b: Tensor, bias: Tensor | None, result: int, turn_a: bool, turn_b: bool
) -> tuple[Shape, tuple[int, ...]]:
    """The product's sizes, and the shape of its result. Raises OrtflowError if shapes or types do not match."""
    if len(b.shape) != 2 or len(a.shape) < 2 or (turn_a and len(a.shape) != 2):
        raise OrtflowError(f"a product of {list(a.shape)} and {list(b.shape)}")
    depth, columns = reversed(b.shape) if turn_b else b.shape
    leading, last = (a.shape[1:], a.shape[0]) if turn_a else (a.shape[:-1], a.shape[-1])
    if last != depth or (bias is not None and bias.shape != (columns,)):
        added = f" and a bias {list(bias.shape)}" if bias is not None else ""
        raise OrtflowError(f"a product of {list(a.shape)} and {list(b.shape)}{added} with sizes that do not match")
    if a.type not in _HALVES or b.type != a.type or result not in (a.type, int(TensorProto.FLOAT)):
        raise OrtflowError("a product of factors that are not both fp16 or both bf16")
    if bias is not None and bias.type != result:
        raise OrtflowError("a bias of another element type than the product's result")
    shape = Shape(a.type, result, math.prod(leading), columns, depth, turn_a, turn_b, bias is not None)
    return shape, (*leading, columns)
