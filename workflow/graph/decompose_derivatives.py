"""Functions of one number that ONNX Runtime computes and cannot differentiate: by their value and their derivative.

f(x) = f(c) + (x - c) f'(c) at c = x, where no gradient passes through c: the value is f's own, the gradient f'.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ortflow.workflow.graph.writer import Context, Writer

_Derivative = Callable[[Writer, str], str]


def by_derivative(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """The operator of its detached input, plus what makes the gradient."""
    w = Writer(node, context)
    x = w.input(0)
    fixed = _detached(w, x)
    slope = DERIVATIVES[node.op_type](w, fixed)
    return w.done(w("Add", w(node.op_type, fixed), w("Mul", w("Sub", x, fixed), slope)))


def _detached(w: Writer, x: str) -> str:
    """The values of x without their gradient: a BatchNormalization of zeros hands its running mean through, negated.

    ONNX Runtime has no operator for this; statistics carry no gradient.
    """
    flat = w("Reshape", x, w.ints(-1))
    count = w("Shape", flat)
    ones = w("Expand", w.constant(1.0), count)
    zeros = w("Expand", w.constant(0.0), w("Concat", w.ints(1), count, axis=0))
    zero = w("Expand", w.constant(0.0), count)
    negated = w("BatchNormalization", zeros, ones, zero, flat, ones, epsilon=0.0)
    return w("Reshape", w("Neg", negated), w("Shape", x))


def _power(w: Writer, x: str, sign: float, offset: float) -> str:
    """sign x^2 + offset."""
    return w("Add", w("Mul", w("Mul", x, x), w.constant(sign)), w.constant(offset))


def _inverse_root(w: Writer, value: str) -> str:
    return w("Reciprocal", w("Sqrt", value))


DERIVATIVES: dict[str, _Derivative] = {
    "Acos": lambda w, x: w("Neg", _inverse_root(w, _power(w, x, -1.0, 1.0))),
    "Acosh": lambda w, x: _inverse_root(w, _power(w, x, 1.0, -1.0)),
    "Asin": lambda w, x: _inverse_root(w, _power(w, x, -1.0, 1.0)),
    "Asinh": lambda w, x: _inverse_root(w, _power(w, x, 1.0, 1.0)),
    "Atan": lambda w, x: w("Reciprocal", _power(w, x, 1.0, 1.0)),
    "Atanh": lambda w, x: w("Reciprocal", _power(w, x, -1.0, 1.0)),
    "Cosh": lambda w, x: w("Sinh", x),
    "Sinh": lambda w, x: w("Cosh", x),
    "Tan": lambda w, x: w("Reciprocal", w("Mul", w("Cos", x), w("Cos", x))),
}
"""Operator -> its derivative at a value."""
