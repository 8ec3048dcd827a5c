"""Operators that select between elements, and sums, powers and remainders, with ONNX's broadcasting."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.origin import torch_operator
from ortflow.workflow.graph.operators.by_element import by_token, divided_together
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, possible_weights


@gradient_rule("Where")
def where(b: Backward) -> Gradients:
    if b.wants(1):
        yield 1, b.summed(b.chosen(b.input(0), b.gradient()), b.input(1), b.output(0))
    if b.wants(2):
        of_else = b("Where", b.input(0), b.number(0), b.gradient())
        yield 2, b.summed(of_else, b.input(2), b.output(0))


@gradient_rule("Clip")
def clip(b: Backward) -> Gradients:
    """No gradient at the limits, as in PyTorch's clamp by numbers, ReLU6 and Hardtanh.

    Roots and logarithms often follow a single limit: their infinite derivative at 0 does not become NaN here.
    """
    limits = [(comparison, b.input(place)) for place, comparison in ((1, "Greater"), (2, "Less")) if b.input(place)]
    inside = [b(comparison, b.input(0), limit) for comparison, limit in limits]
    if not inside:
        yield 0, b.gradient()
    elif len(inside) == 1:
        yield 0, b.chosen(inside[0], b.gradient())
    else:
        choice = b.chosen if b.output(0) in b.context.steep else b.passed
        yield 0, choice(b("And", *inside), b.gradient())


@gradient_rule("Max", "Min")
def extremes(b: Backward) -> Gradients:
    """Equal inputs share the gradient, as in PyTorch's maximum and its clamp by tensors."""
    y, gradient = b.output(0), b.gradient()
    if torch_operator(b.node).startswith("aten.clamp") and b.value(1) is not None and b.rank(1) == 0:
        inside = b("Greater" if b.node.op_type == "Max" else "Less", b.input(0), b.input(1))
        yield 0, b.chosen(inside, gradient)
        return
    if len(b.node.input) == 1:
        yield 0, gradient
        return
    equal = [b("Equal", name, y) for name in b.node.input]
    counts = [b("Cast", is_extreme, to=b.element_type()) for is_extreme in equal]
    total = counts[0]
    for count in counts[1:]:
        total = b("Add", total, count)
    share = b("Div", gradient, total)
    for place, is_extreme in enumerate(equal):
        if b.wants(place):
            yield place, b.summed(b.chosen(is_extreme, share), b.input(place), y)


@gradient_rule("Sum", "Mean")
def sums(b: Backward) -> Gradients:
    gradient = b.gradient()
    if b.node.op_type == "Mean" and len(b.node.input) > 1:
        gradient = b("Div", gradient, b.number(len(b.node.input)))
    for place in range(len(b.node.input)):
        if b.wants(place):
            yield place, b.summed(gradient, b.input(place), b.output(0))


@gradient_rule("Mod")
def remainder(b: Backward) -> Gradients:
    """y is x minus an integer multiple of the divisor; the integer has derivative 0."""
    if b.wants(0):
        yield 0, b.summed(b.gradient(), b.input(0), b.output(0))
    if b.wants(1):
        # An integer but for the rounding of the difference and the quotient.
        quotient = b("Round", b("Div", b("Sub", b.input(0), b.output(0)), b.input(1)))
        yield 1, b("Neg", b.summed(b("Mul", b.gradient(), quotient), b.input(1), b.output(0)))


@gradient_rule("Pow")
def power(b: Backward) -> Gradients:
    """y x^(y - 1) and x^y log x; 0 if y is 0, or if x is 0 and y is not negative, as in PyTorch."""
    x, gradient = b.input(0), b.gradient()
    if b.wants(0):
        yield from _by_base(b)
    if b.wants(1):
        exponent, zero = b.input(1), b.number(0)
        flat = b("And", b("Equal", x, zero), b("GreaterOrEqual", exponent, zero))
        slope = b("Mul", gradient, b("Mul", b.output(0), b("Log", x)))
        yield 1, b.summed(b("Where", flat, zero, slope), exponent, b.output(0))


def _by_base(b: Backward) -> Gradients:
    x, exponent, value = b.input(0), b.input(1), b.value(1)
    constant_exponent = float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None
    if constant_exponent == 0:
        return
    gradient = b.gradient()
    if constant_exponent is not None:
        if constant_exponent != 1:
            gradient = b("Mul", b("Mul", gradient, b.number(constant_exponent)), _power(b, x, constant_exponent - 1))
    else:
        if shapes.element_type(b.context.types, exponent) != b.element_type():
            exponent = b("Cast", exponent, to=b.element_type())
        slope = b("Mul", b("Pow", x, b("Sub", exponent, b.number(1))), exponent)
        slope = b("Where", b("Equal", exponent, b.number(0)), b.number(0), slope)
        gradient = b("Mul", gradient, slope)
    yield 0, b.summed(gradient, x, b.output(0))


def _power(b: Backward, x: str, exponent: float) -> str:
    """Small powers are computed by multiplication, which takes a tenth of the time."""
    if exponent in (1, 2):
        return x if exponent == 1 else b("Mul", x, x)
    return b("Pow", x, b.number(exponent))


@division_rule("Clip")
def clip_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    if any(input_cuts[1:]):
        raise s.unsupported(node)
    return [input_cuts[0]]


division_rule("Max", "Mean", "Min", "Mod", "Pow", "Sum", "Where")(divided_together)
token_rule("Clip", "Max", "Mean", "Min", "Pow", "Sum", "Where")(by_token)
possible_weights(["Where"], 1, 2)
describe(["Max", "Min", "Mod", "Where"], Trait.GIVES_SIZES)
describe(["Clip", "Max", "Min", "Pow", "Sum", "Where"], Trait.PASSES_STEEPNESS)
describe(["Clip"], Trait.FIRST_DIVIDED)
