"""Functions of one variable, whose gradient is that of the result times the derivative.

Where the derivative jumps, it has PyTorch's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.operators.by_element import by_token, divided_alike
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import token_rule
from ortflow.workflow.graph.rules.spread import division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


def _square(b: Backward, value: str) -> str:
    return b("Mul", value, value)


def _times(b: Backward, value: str, factor: float) -> str:
    return b("Mul", value, b.number(factor))


def _one_minus_square(b: Backward, x: str) -> str:
    """(1 - x) (1 + x), which is accurate near 1."""
    return b("Mul", b("Sub", b.number(1), x), b("Add", b.number(1), x))


def _one_plus_square(b: Backward, x: str) -> str:
    return b("Add", _square(b, x), b.number(1))


def _over_root(b: Backward, gradient: str, value: str) -> str:
    return b("Div", gradient, b("Sqrt", value))


def _hyperbolic_root(b: Backward, x: str) -> str:
    # x squared minus 1 would lose its digits near 1.
    return b("Mul", b("Sub", x, b.number(1)), b("Add", x, b.number(1)))


def _error_function(b: Backward, gradient: str, x: str) -> str:
    density = b("Exp", b("Neg", _square(b, x)))
    return b("Mul", gradient, _times(b, density, 2 / math.sqrt(math.pi)))


_OF_INPUT: dict[str, Callable[[Backward, str, str], str]] = {
    "Abs": lambda b, g, x: b("Mul", g, b("Sign", x)),
    "Acos": lambda b, g, x: b("Neg", _over_root(b, g, _one_minus_square(b, x))),
    "Acosh": lambda b, g, x: _over_root(b, g, _hyperbolic_root(b, x)),
    "Asin": lambda b, g, x: _over_root(b, g, _one_minus_square(b, x)),
    "Asinh": lambda b, g, x: _over_root(b, g, _one_plus_square(b, x)),
    "Atan": lambda b, g, x: b("Div", g, _one_plus_square(b, x)),
    "Atanh": lambda b, g, x: b("Div", g, _one_minus_square(b, x)),
    "Cos": lambda b, g, x: b("Neg", b("Mul", g, b("Sin", x))),
    "Cosh": lambda b, g, x: b("Mul", g, b("Sinh", x)),
    "Erf": _error_function,
    "Log": lambda b, g, x: b("Div", g, x),
    "Neg": lambda b, g, x: b("Neg", g),
    "Sin": lambda b, g, x: b("Mul", g, b("Cos", x)),
    "Sinh": lambda b, g, x: b("Mul", g, b("Cosh", x)),
    "Softplus": lambda b, g, x: b("Mul", g, b("Sigmoid", x)),
    "Softsign": lambda b, g, x: b("Div", g, _square(b, b("Add", b("Abs", x), b.number(1)))),
}
"""Operator -> function of (gradient of the output, input)."""

_OF_OUTPUT: dict[str, Callable[[Backward, str, str], str]] = {
    "Exp": lambda b, g, y: b("Mul", g, y),
    "Reciprocal": lambda b, g, y: b("Neg", b("Mul", g, _square(b, y))),
    # `passed` multiplies by 0, which makes NaN of an infinite gradient (`steep`).
    "Relu": lambda b, g, y: (b.chosen if y in b.context.steep else b.passed)(b("Greater", y, b.number(0)), g),
    "Sigmoid": lambda b, g, y: b("Mul", g, b("Mul", y, b("Sub", b.number(1), y))),
    "Sqrt": lambda b, g, y: b("Div", _times(b, g, 0.5), y),
    "Tan": lambda b, g, y: b("Mul", g, _one_plus_square(b, y)),
    "Tanh": lambda b, g, y: b("Mul", g, b("Sub", b.number(1), _square(b, y))),
}
"""Operator -> function of (gradient of the output, output)."""


@gradient_rule(*_OF_INPUT)
def by_input(b: Backward) -> Gradients:
    yield 0, _OF_INPUT[b.node.op_type](b, b.gradient(), b.input(0))


@gradient_rule(*_OF_OUTPUT)
def by_output(b: Backward) -> Gradients:
    yield 0, _OF_OUTPUT[b.node.op_type](b, b.gradient(), b.output(0))


@composition("SigmoidGrad")
def sigmoid_gradient(w: Replacement) -> None:
    """The derivative of s is s (1 - s)."""
    gradient, y = w.node.input
    w.done(w("Mul", gradient, w("Mul", y, w("Sub", w.constant(1), y))))


@gradient_rule("Ceil", "Floor", "Hardmax", "Round", "Sign")
def steps(b: Backward) -> Gradients:
    """The derivative is 0, as in PyTorch; nodes before this one need no gradient."""
    yield from ()


@gradient_rule("Cast")
def cast(b: Backward) -> Gradients:
    yield 0, b("Cast", b.gradient(), to=shapes.element_type(b.context.types, b.input(0)))


division_rule(
    "Abs", "Acos", "Asin", "Atan", "Cast", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsInf", "IsNaN", "Log", "Neg",
    "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
)(divided_alike)  # fmt: skip
token_rule(
    "Abs", "Cast", "Ceil", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign",
    "Softplus", "Softsign", "Sqrt", "Tanh",
)(by_token)  # fmt: skip
describe(["Abs", "Erf", "Exp", "Log", "Neg", "Reciprocal", "Sigmoid", "Sqrt", "Tanh"], Trait.KEEPS_TYPE)
describe(["Cast", "Neg"], Trait.GIVES_SIZES)
describe(["Abs", "Cast", "Neg"], Trait.PASSES_STEEPNESS)
