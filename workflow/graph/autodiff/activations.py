"""Rules for piecewise activations, activations with parameters, and the Gelu family.

Where the derivative jumps, it has PyTorch's value.
"""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule
from ortflow.workflow.graph.domains import MICROSOFT


def _positive(b: Backward) -> str:
    return b("Greater", b.input(0), b.number(0))


def _scaled(b: Backward, value: str, factor: float) -> str:
    return value if factor == 1 else b("Mul", value, b.number(factor))


@rule("LeakyRelu")
def leaky_relu(b: Backward) -> Gradients:
    slope = b.attribute("alpha", 0.01)
    yield 0, b("Where", _positive(b), b.gradient(), _scaled(b, b.gradient(), slope))


@rule("PRelu")
def parametric_relu(b: Backward) -> Gradients:
    positive, gradient = _positive(b), b.gradient()
    if b.wants(0):
        yield 0, b("Where", positive, gradient, b("Mul", gradient, b.input(1)))
    if b.wants(1):
        slope = b("Where", positive, b.number(0), b("Mul", gradient, b.input(0)))
        yield 1, b.summed(slope, b.input(1), b.output(0))


@rule("ThresholdedRelu")
def thresholded_relu(b: Backward) -> Gradients:
    yield 0, b.chosen(b("Greater", b.input(0), b.number(b.attribute("alpha", 1.0))), b.gradient())


@rule("Elu", "Selu", "Celu")
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


@rule("HardSigmoid")
def hard_sigmoid(b: Backward) -> Gradients:
    y = b.output(0)
    inside = b("And", b("Greater", y, b.number(0)), b("Less", y, b.number(1)))
    yield 0, b.chosen(inside, _scaled(b, b.gradient(), b.attribute("alpha", 0.2)))


@rule("HardSwish")
def hard_swish(b: Backward) -> Gradients:
    """y = x max(0, min(1, x / 6 + 1 / 2)). The derivative is x / 3 + 1 / 2 between -3 and 3."""
    x, gradient = b.input(0), b.gradient()
    bent = b("Mul", gradient, b("Add", b("Div", x, b.number(3)), b.number(0.5)))
    below = b("LessOrEqual", x, b.number(-3))
    above = b("GreaterOrEqual", x, b.number(3))
    yield 0, b("Where", above, gradient, b("Where", below, b.number(0), bent))


@rule("Mish")
def mish(b: Backward) -> Gradients:
    """y = x t with t = tanh(softplus x). The derivative is t + x (1 - t^2) sigmoid x."""
    x = b.input(0)
    t = b("Tanh", b("Softplus", x))
    bend = b("Mul", b("Mul", x, b("Sigmoid", x)), b("Sub", b.number(1), b("Mul", t, t)))
    yield 0, b("Mul", b.gradient(), b("Add", t, bend))


@rule("Gelu", "FastGelu", "BiasGelu", domain=MICROSOFT)
def gelu(b: Backward) -> Gradients:
    """Emits gradient nodes that `compose` and our kernels know. A bias is added before them."""
    x = b("Add", b.input(0), b.input(1)) if b.input(1) else b.input(0)
    operator = "FastGeluGrad" if b.node.op_type == "FastGelu" else "GeluGrad"
    slope = b(operator, b.gradient(), x, domain=MICROSOFT)
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(slope, b.input(place), b.output(0))


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(b: Backward) -> Gradients:
    """y = x s with s = sigmoid(alpha x). The derivative is s (1 + alpha x (1 - s))."""
    inner = _scaled(b, b.input(0), b.attribute("alpha", 1.702))
    s = b("Sigmoid", inner)
    slope = b("Mul", s, b("Add", b("Mul", inner, b("Sub", b.number(1), s)), b.number(1)))
    yield 0, b("Mul", b.gradient(), slope)
