"""Det by elimination with full pivoting: one step for each column, all in operators that have a rule."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.replacement import LAST, Context, Replacement

_MOST = 64
"""Rows of a matrix: each adds about 25 nodes, and three times as many to the gradient."""


def determinant(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """The product of the pivots, negative after an odd number of swaps.

    The last pivot divides nothing, and no earlier one is 0 unless the rank is lower by two: the gradient of a matrix of
    one rank less is exact, where PyTorch's is 0 if its determinant is exactly 0.
    """
    w = Replacement(node, context)
    size = w.shape(0)[-1]
    if size is None or size > _MOST:
        rows = "a size that is not known" if size is None else f"{size} rows"
        raise w.refusal(f"its matrices have {rows}, and at most {_MOST} are supported")
    zero, one, minus = w.constant(0.0), w.constant(1.0), w.constant(-1.0)
    rest, pivots, signs = w.input(0), [], []
    for size_left in range(size, 1, -1):
        # The largest element of all. In a column of zeros alone, none would be the pivot of another row's gradient.
        highest = w("ArgMax", w("ReduceMax", w("Abs", rest), w.ints(-1), keepdims=1), axis=-2, keepdims=1)
        row, other_rows = _swapped(w, rest, highest, -2, size_left)
        widest = w("ArgMax", w("Abs", row), axis=-1, keepdims=1)
        column, rest = _swapped(w, w("Concat", row, other_rows, axis=-2), widest, -1, size_left)
        (pivot, below), (later, rest) = _halves(w, column, -2), _halves(w, rest, -2)
        divisor = w("Where", w("Equal", pivot, zero), one, pivot)
        rest = w("Sub", rest, w("MatMul", w("Div", below, divisor), later))
        pivots.append(pivot)
        signs += [w("Where", w("Equal", place, w.constant(0, np.int64)), one, minus) for place in (highest, widest)]
    product = w("ReduceProd", w("Concat", *pivots, rest, axis=-1), w.ints(-1), keepdims=1) if pivots else rest
    for sign in signs:
        product = w("Mul", product, sign)
    return w.done(w("Squeeze", product, w.ints(-2, -1)))


def _swapped(w: Replacement, value: str, place: str, axis: int, length: int) -> tuple[str, str]:
    """The row (axis -2) or column (axis -1) at `place` [..., 1, 1], and the others, the first of them in its place."""
    along, across = (np.arange(length)[:, None], np.arange(length)[None])[:: 1 if axis == -2 else -1]
    selector = w("Cast", w("Equal", w.constant(across, np.int64), place), to=TensorProto.FLOAT)
    first, remainder = _halves(w, value, axis)
    behind = along[1:] if axis == -2 else along[:, 1:]
    remainder = w("Where", w("Equal", w.constant(behind, np.int64), place), first, remainder)
    return w("MatMul", *((selector, value) if axis == -2 else (value, selector))), remainder


def _halves(w: Replacement, value: str, axis: int) -> tuple[str, str]:
    """The first element along an axis, and the others."""
    first, remainder = (
        w("Slice", value, w.ints(start), w.ints(end), w.ints(axis)) for start, end in ((0, 1), (1, LAST))
    )
    return first, remainder
