"""Det by elimination with partial pivoting: one step for each column, all in operators that have a rule."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.replacement import LAST, Context, Replacement

_MOST = 64
"""Rows of a matrix: each adds about 15 nodes, and three times as many to the gradient."""


def determinant(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """The product of the pivots, negative after an odd number of swaps.

    The last pivot divides nothing, so that the gradient of a matrix of one rank less is exact.
    """
    w = Replacement(node, context)
    size = w.shape(0)[-1]
    if size is None or size > _MOST:
        rows = "a size that is not known" if size is None else f"{size} rows"
        raise w.refusal(f"its matrices have {rows}, and at most {_MOST} are supported")
    zero, one, minus = w.constant(0.0), w.constant(1.0), w.constant(-1.0)
    rest, pivots, signs = w.input(0), [], []
    for left in range(size, 1, -1):
        column = w("Slice", rest, w.ints(0), w.ints(1), w.ints(-1))
        place = w("ArgMax", w("Abs", column), axis=-2, keepdims=1)
        chosen = w("Cast", w("Equal", w.constant(np.arange(left)[None], np.int64), place), to=TensorProto.FLOAT)
        row = w("MatMul", chosen, rest)
        first, others = (w("Slice", rest, w.ints(start), w.ints(end), w.ints(-2)) for start, end in ((0, 1), (1, LAST)))
        # The first row takes the place of the chosen one.
        swapped = w("Equal", w.constant(np.arange(1, left)[:, None], np.int64), place)
        others = w("Where", swapped, first, others)
        pivot, later = (w("Slice", row, w.ints(start), w.ints(end), w.ints(-1)) for start, end in ((0, 1), (1, LAST)))
        divisor = w("Where", w("Equal", pivot, zero), one, pivot)
        factors = w("Div", w("Slice", others, w.ints(0), w.ints(1), w.ints(-1)), divisor)
        rest = w("Sub", w("Slice", others, w.ints(1), w.ints(LAST), w.ints(-1)), w("MatMul", factors, later))
        pivots.append(pivot)
        signs.append(w("Where", w("Equal", place, w.constant(0, np.int64)), one, minus))
    product = w("ReduceProd", w("Concat", *pivots, rest, axis=-1), w.ints(-1), keepdims=1) if pivots else rest
    for sign in signs:
        product = w("Mul", product, sign)
    return w.done(w("Squeeze", product, w.ints(-2, -1)))
