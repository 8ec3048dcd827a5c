"""Gradient operators of activations, in standard operators."""

from __future__ import annotations

import math
from collections.abc import Callable

from ortflow.workflow.graph.ir.replacement import Replacement

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715


def gelu(w: Replacement) -> None:
    """y = x F(x), with F the normal distribution and f its density. The derivative is F + x f."""
    gradient, x = w.node.input
    half = w.constant(0.5)
    below = w("Add", w("Mul", w("Erf", w("Mul", x, w.constant(math.sqrt(0.5)))), half), half)
    density = w("Exp", w("Mul", w("Mul", x, x), w.constant(-0.5)))
    rising = w("Mul", w("Mul", density, w.constant(1 / math.sqrt(2 * math.pi))), x)
    w.done(w("Mul", w("Add", rising, below), gradient))


def fast_gelu(w: Replacement) -> None:
    """y = x s with s = sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3). The derivative is s (1 + x u' (1 - s))."""
    gradient, x = w.node.input
    one, linear, square = w.constant(1), w.constant(_SLOPE), w("Mul", x, x)
    steep = w("Add", w("Mul", square, w.constant(_SLOPE * _CUBE)), linear)
    s = w("Sigmoid", w("Mul", steep, x))
    slope = w("Mul", w("Add", w("Mul", square, w.constant(3 * _SLOPE * _CUBE)), linear), x)
    bend = w("Add", w("Mul", slope, w("Sub", one, s)), one)
    w.done(w("Mul", w("Mul", bend, s), gradient))


def sigmoid(w: Replacement) -> None:
    """The derivative of s is s (1 - s)."""
    gradient, y = w.node.input
    w.done(w("Mul", gradient, w("Mul", y, w("Sub", w.constant(1), y))))


ACTIVATIONS: dict[str, Callable[[Replacement], None]] = {
    "FastGeluGrad": fast_gelu,
    "GeluGrad": gelu,
    "SigmoidGrad": sigmoid,
}
