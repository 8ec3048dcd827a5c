"""Products of half-precision matrices by cuBLASLt, as in linear layers and their gradients.

Product (a [..., k], b [k, n], bias fp16 or bf16 [n]?) -> a b + bias, [..., n], of a's element type or fp32. `turn_a`: a
is [k, rows], with two axes; `turn_b`: b is [n, k].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.lt import TYPES, WORKSPACE, Place, Shape, library
from ortflow.workflow.cuda.operators import Call, Tensor
from ortflow.workflow.errors import OrtflowError

_HALVES = TYPES.keys() - {int(TensorProto.FLOAT)}


class Product:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._turns = bool(attributes.get("turn_a", 0)), bool(attributes.get("turn_b", 0))

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if shapes or types do not match."""
        a, b = call.given(0), call.given(1)
        bias = call.inputs[2] if len(call.inputs) > 2 else None
        shape, dims = shape_of(a, b, bias, call.types[0], *self._turns)
        out = call.output(0, dims)
        if not shape.rows * shape.columns:
            return
        if not shape.depth:
            raise OrtflowError(f"a product of {list(a.shape)} and {list(b.shape)} sums nothing")
        place = Place(a.pointer, b.pointer, out, bias.pointer if bias else 0, call.scratch(WORKSPACE), call.stream)
        library(call.gpu).run(shape, place, measures=not call.captured)


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
    found = Shape(a.type, result, math.prod(leading), columns, depth, turn_a, turn_b, bias is not None)
    return found, (*leading, columns)
