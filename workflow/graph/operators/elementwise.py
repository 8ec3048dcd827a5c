"""Arithmetic, comparisons and logic with ONNX's broadcasting."""

from __future__ import annotations

from ortflow.workflow.graph.operators.by_element import by_token, divided_alike, divided_together
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import token_rule
from ortflow.workflow.graph.rules.spread import division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, possible_weights


@gradient_rule("Identity")
def identity(b: Backward) -> Gradients:
    yield 0, b.gradient()


@gradient_rule("Add")
def add(b: Backward) -> Gradients:
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(b.gradient(), b.input(place), b.output(0))


@gradient_rule("Sub")
def subtract(b: Backward) -> Gradients:
    if b.wants(0):
        yield 0, b.summed(b.gradient(), b.input(0), b.output(0))
    if b.wants(1):
        yield 1, b("Neg", b.summed(b.gradient(), b.input(1), b.output(0)))


@gradient_rule("Mul")
def multiply(b: Backward) -> Gradients:
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(b("Mul", b.gradient(), b.input(1 - place)), b.input(place), b.output(0))


@gradient_rule("Div")
def divide(b: Backward) -> Gradients:
    if b.wants(0):
        yield 0, b.summed(b("Div", b.gradient(), b.input(1)), b.input(0), b.output(0))
    if b.wants(1):
        # d(x / y) / dy = -(x / y) / y: the square of y would be 0 below 1e-23 and infinite above 2e19.
        slope = b("Div", b("Mul", b.gradient(), b.output(0)), b.input(1))
        yield 1, b("Neg", b.summed(slope, b.input(1), b.output(0)))


_ARITHMETIC = ("Add", "Sub", "Mul", "Div")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
division_rule("Identity", "Not")(divided_alike)
division_rule(*_ARITHMETIC, *_COMPARISONS, "And", "BitwiseAnd", "BitwiseOr", "Or", "Xor")(divided_together)
token_rule(*_ARITHMETIC, *_COMPARISONS, "Identity", "Not")(by_token)
possible_weights(_ARITHMETIC, 0, 1)
describe([*_ARITHMETIC, "Identity"], Trait.KEEPS_TYPE, Trait.GIVES_SIZES)
describe(["And", "Equal", "Greater", "Less", "Not", "Or"], Trait.GIVES_SIZES)
describe(["Identity"], Trait.MOVES)
describe(["Div", "Identity", "Mul", "Sub"], Trait.PASSES_STEEPNESS)
