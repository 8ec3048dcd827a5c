"""Piecewise activations, activations with parameters, and the Gelu family.

Where the derivative jumps, it has PyTorch's value.
"""

from __future__ import annotations

import math

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.operators.by_element import by_token, divided_alike, divided_together
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import token_rule
from ortflow.workflow.graph.rules.size import first_like_first, size_rule
from ortflow.workflow.graph.rules.spread import division_rule
from ortflow.workflow.graph.rules.traits import weights

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _positive(b: Backward) -> str:
    return b("Greater", b.input(0), b.number(0))


def _scaled(b: Backward, value: str, factor: float) -> str:
    return value if factor == 1 else b("Mul", value, b.number(factor))


@gradient_rule("LeakyRelu")
def leaky_relu(b: Backward) -> Gradients:
    slope = b.attribute("alpha", 0.01)
    yield 0, b("Where", _positive(b), b.gradient(), _scaled(b, b.gradient(), slope))


@gradient_rule("PRelu")
def parametric_relu(b: Backward) -> Gradients:
    positive, gradient = _positive(b), b.gradient()
    if b.wants(0):
        yield 0, b("Where", positive, gradient, b("Mul", gradient, b.input(1)))
    if b.wants(1):
        slope = b("Where", positive, b.number(0), b("Mul", gradient, b.input(0)))
        yield 1, b.summed(slope, b.input(1), b.output(0))


@gradient_rule("ThresholdedRelu")
def thresholded_relu(b: Backward) -> Gradients:
    yield 0, b.chosen(b("Greater", b.input(0), b.number(b.attribute("alpha", 1.0))), b.gradient())


@gradient_rule("Elu", "Selu", "Celu")
def exponential_linear(b: Backward) -> Gradients:
    """y = outer x for positive x, outer alpha (exp(x / inner) - 1) otherwise."""
    kind, x = b.node.op_type, b.input(0)
    # ONNX's defaults: the singles that are nearest to Selu's constants.
    alpha = b.attribute("alpha", 1.67326319217681884765625 if kind == "Selu" else 1.0)
    outer = b.attribute("gamma", 1.05070102214813232421875) if kind == "Selu" else 1.0
    inner = alpha if kind == "Celu" else 1.0
    curve = b("Exp", x if inner == 1 else b("Div", x, b.number(inner)))
    gradient = _scaled(b, b.gradient(), outer)
    # The branch that overflows for large x is not selected there.
    yield 0, b("Where", _positive(b), gradient, b("Mul", gradient, _scaled(b, curve, alpha / inner)))


@gradient_rule("HardSigmoid")
def hard_sigmoid(b: Backward) -> Gradients:
    y = b.output(0)
    inside = b("And", b("Greater", y, b.number(0)), b("Less", y, b.number(1)))
    yield 0, b.chosen(inside, _scaled(b, b.gradient(), b.attribute("alpha", 0.2)))


@gradient_rule("HardSwish")
def hard_swish(b: Backward) -> Gradients:
    """y = x max(0, min(1, x / 6 + 1 / 2)). The derivative is x / 3 + 1 / 2 between -3 and 3."""
    x, gradient = b.input(0), b.gradient()
    bent = b("Mul", gradient, b("Add", b("Div", x, b.number(3)), b.number(0.5)))
    below = b("LessOrEqual", x, b.number(-3))
    above = b("GreaterOrEqual", x, b.number(3))
    yield 0, b("Where", above, gradient, b("Where", below, b.number(0), bent))


@gradient_rule("Mish")
def mish(b: Backward) -> Gradients:
    """y = x t with t = tanh(softplus x). The derivative is t + x (1 - t^2) sigmoid x."""
    x = b.input(0)
    t = b("Tanh", b("Softplus", x))
    bend = b("Mul", b("Mul", x, b("Sigmoid", x)), b("Sub", b.number(1), b("Mul", t, t)))
    yield 0, b("Mul", b.gradient(), b("Add", t, bend))


@gradient_rule("Gelu", "FastGelu", "BiasGelu", domain=MICROSOFT)
def gelu(b: Backward) -> Gradients:
    """Emits gradient nodes that `compose` and our kernels know. A bias is added before them."""
    x = b("Add", b.input(0), b.input(1)) if b.input(1) else b.input(0)
    operator = "FastGeluGrad" if b.node.op_type == "FastGelu" else "GeluGrad"
    slope = b(operator, b.gradient(), x, domain=MICROSOFT)
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(slope, b.input(place), b.output(0))


@composition("GeluGrad")
def gelu_gradient(w: Replacement) -> None:
    """y = x F(x), with F the normal distribution and f its density. The derivative is F + x f."""
    gradient, x = w.node.input
    half = w.constant(0.5)
    below = w("Add", w("Mul", w("Erf", w("Mul", x, w.constant(math.sqrt(0.5)))), half), half)
    density = w("Exp", w("Mul", w("Mul", x, x), w.constant(-0.5)))
    rising = w("Mul", w("Mul", density, w.constant(1 / math.sqrt(2 * math.pi))), x)
    w.done(w("Mul", w("Add", rising, below), gradient))


@composition("FastGeluGrad")
def fast_gelu_gradient(w: Replacement) -> None:
    """y = x s with s = sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3). The derivative is s (1 + x u' (1 - s))."""
    gradient, x = w.node.input
    one, linear, square = w.constant(1), w.constant(_SLOPE), w("Mul", x, x)
    steep = w("Add", w("Mul", square, w.constant(_SLOPE * _CUBE)), linear)
    s = w("Sigmoid", w("Mul", steep, x))
    slope = w("Mul", w("Add", w("Mul", square, w.constant(3 * _SLOPE * _CUBE)), linear), x)
    bend = w("Add", w("Mul", slope, w("Sub", one, s)), one)
    w.done(w("Mul", w("Mul", bend, s), gradient))


@gradient_rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(b: Backward) -> Gradients:
    """y = x s with s = sigmoid(alpha x). The derivative is s (1 + alpha x (1 - s))."""
    inner = _scaled(b, b.input(0), b.attribute("alpha", 1.702))
    s = b("Sigmoid", inner)
    slope = b("Mul", s, b("Add", b("Mul", inner, b("Sub", b.number(1), s)), b.number(1)))
    yield 0, b("Mul", b.gradient(), slope)


_UNARY = ("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu")
division_rule(*_UNARY, "ThresholdedRelu")(divided_alike)
division_rule("PRelu")(divided_together)
division_rule("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain=MICROSOFT)(divided_together)
token_rule(*_UNARY, "PRelu")(by_token)
token_rule("Gelu", "FastGelu", "QuickGelu", domain=MICROSOFT)(by_token)
size_rule("BiasGelu", "FastGelu", "Gelu", "GeluGrad", "QuickGelu")(first_like_first)
weights(["PRelu", "BiasGelu", "FastGelu"], 1)
