"""Rules for operators that reduce axes, and for running sums."""

from __future__ import annotations

import math

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule
from ortflow.workflow.graph.ir.origin import torch_operator


def spread(b: Backward, value: str) -> str:
    """`value`, of the output's shape, with the reduced axes restored where they are known.

    The result broadcasts to the shape of the node's input.
    """
    if b.attribute("keepdims", 1) or not b.input(1):
        # Without axes, all axes were reduced, or none: a scalar broadcasts to anything.
        return value
    return b("Unsqueeze", value, b.input(1))


def _expanded(b: Backward, value: str) -> str:
    return b("Expand", spread(b, value), b.shape_of(b.input(0)))


def _axis(b: Backward) -> int | None:
    """The axis of a reduction over one that is known; None otherwise."""
    axes = b.value(1)
    return int(axes.reshape(-1)[0]) if axes is not None and axes.size == 1 else None


def _reduced(b: Backward, operator: str, value: str) -> str:
    """`value`, of the input's shape, reduced like the node does but with the axes kept."""
    axes = [b.input(1)] if b.input(1) else []
    return b(operator, value, *axes, keepdims=1, noop_with_empty_axes=b.attribute("noop_with_empty_axes", 0))


@rule("ReduceSum")
def reduce_sum(b: Backward) -> Gradients:
    yield 0, _expanded(b, b.gradient())


@rule("ReduceMean")
def reduce_mean(b: Backward) -> Gradients:
    sizes = [b.dims(name) for name in (b.input(0), b.output(0))]
    if sizes[0] is None or sizes[1] is None:
        # In floating point: an integer division by 0 ends the process.
        total, remaining = (b("Cast", b("Size", name), to=b.element_type()) for name in (b.input(0), b.output(0)))
        count = b("Div", total, remaining)
    else:
        count = b.number(math.prod(sizes[0]) / max(1, math.prod(sizes[1])))
    yield 0, _expanded(b, b("Div", b.gradient(), count))


@rule("ReduceMax", "ReduceMin")
def extreme(b: Backward) -> Gradients:
    """Elements that equal the extreme share its gradient, as in PyTorch's amax; in its max(dim), the first gets it."""
    axis = _axis(b)
    if axis is not None and torch_operator(b.node) in ("aten.max.dim", "aten.min.dim"):
        first = b("ArgMax" if b.node.op_type == "ReduceMax" else "ArgMin", b.input(0), axis=axis, keepdims=1)
        yield 0, b("ScatterElements", b.zeros(b.input(0)), first, spread(b, b.gradient()), axis=axis)
        return
    is_extreme = b("Equal", b.input(0), spread(b, b.output(0)))
    count = _reduced(b, "ReduceSum", b("Cast", is_extreme, to=b.element_type()))
    yield 0, b.chosen(is_extreme, b("Div", spread(b, b.gradient()), count))


@rule("ReduceProd")
def product(b: Backward) -> Gradients:
    """The gradient of a factor is the product of the others, which is 0 if another factor is 0."""
    x, zero, one = b.input(0), b.number(0), b.number(1)
    empty = b("Equal", x, zero)
    factors = b("Where", empty, one, x)
    nothing = b("Cast", empty, to=b.element_type())
    other_zeros = b("Sub", _reduced(b, "ReduceSum", nothing), nothing)
    product = b("Mul", spread(b, b.gradient()), _reduced(b, "ReduceProd", factors))
    yield 0, b.chosen(b("Equal", other_zeros, zero), b("Div", product, factors))


@rule("ReduceL1")
def sum_of_sizes(b: Backward) -> Gradients:
    yield 0, b("Mul", b("Sign", b.input(0)), spread(b, b.gradient()))


@rule("ReduceL2")
def root_of_squares(b: Backward) -> Gradients:
    """dx = dy x / y, and 0 if all elements are 0, as in PyTorch."""
    y = b.output(0)
    divisor = b("Where", b("Equal", y, b.number(0)), b.number(1), y)
    yield 0, b("Mul", b.input(0), spread(b, b("Div", b.gradient(), divisor)))


@rule("ReduceSumSquare")
def sum_of_squares(b: Backward) -> Gradients:
    yield 0, b("Mul", b.input(0), spread(b, b("Mul", b.gradient(), b.number(2))))


@rule("ReduceLogSum")
def logarithm_of_sum(b: Backward) -> Gradients:
    yield 0, _expanded(b, b("Div", b.gradient(), b("Exp", b.output(0))))


@rule("ReduceLogSumExp")
def logarithm_of_exponentials(b: Backward) -> Gradients:
    # The output is at least as large as each input, so that Exp cannot overflow.
    share = b("Exp", b("Sub", b.input(0), spread(b, b.output(0))))
    yield 0, b("Mul", share, spread(b, b.gradient()))


@rule("CumSum")
def running_sum(b: Backward) -> Gradients:
    """A running sum from the other end."""
    reverse, exclusive = 1 - b.attribute("reverse", 0), b.attribute("exclusive", 0)
    yield 0, b("CumSum", b.gradient(), b.input(1), reverse=reverse, exclusive=exclusive)
