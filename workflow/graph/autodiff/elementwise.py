"""Rules for elementwise operators with ONNX's broadcasting."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule


@rule("Identity")
def identity(b: Backward) -> Gradients:
    yield 0, b.gradient()


@rule("Add")
def add(b: Backward) -> Gradients:
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(b.gradient(), b.input(place), b.output(0))


@rule("Sub")
def subtract(b: Backward) -> Gradients:
    if b.wants(0):
        yield 0, b.summed(b.gradient(), b.input(0), b.output(0))
    if b.wants(1):
        yield 1, b("Neg", b.summed(b.gradient(), b.input(1), b.output(0)))


@rule("Mul")
def multiply(b: Backward) -> Gradients:
    for place in (0, 1):
        if b.wants(place):
            yield place, b.summed(b("Mul", b.gradient(), b.input(1 - place)), b.input(place), b.output(0))


@rule("Div")
def divide(b: Backward) -> Gradients:
    if b.wants(0):
        yield 0, b.summed(b("Div", b.gradient(), b.input(1)), b.input(0), b.output(0))
    if b.wants(1):
        # d(x / y) / dy = -(x / y) / y: the square of y would be 0 below 1e-23 and infinite above 2e19.
        slope = b("Div", b("Mul", b.gradient(), b.output(0)), b.input(1))
        yield 1, b("Neg", b.summed(slope, b.input(1), b.output(0)))
