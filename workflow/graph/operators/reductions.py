"""Operators that reduce axes, and running sums."""

from __future__ import annotations

import math

import onnx

from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.origin import torch_operator
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


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


@gradient_rule("ReduceSum")
def reduce_sum(b: Backward) -> Gradients:
    yield 0, _expanded(b, b.gradient())


@gradient_rule("ReduceMean")
def reduce_mean(b: Backward) -> Gradients:
    sizes = [b.dims(name) for name in (b.input(0), b.output(0))]
    if sizes[0] is None or sizes[1] is None:
        # In floating point: an integer division by 0 ends the process.
        total, remaining = (b("Cast", b("Size", name), to=b.element_type()) for name in (b.input(0), b.output(0)))
        count = b("Div", total, remaining)
    else:
        count = b.number(math.prod(sizes[0]) / max(1, math.prod(sizes[1])))
    yield 0, _expanded(b, b("Div", b.gradient(), count))


@gradient_rule("ReduceMax", "ReduceMin")
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


@gradient_rule("ReduceProd")
def product(b: Backward) -> Gradients:
    """The gradient of a factor is the product of the others, which is 0 if another factor is 0."""
    x, zero, one = b.input(0), b.number(0), b.number(1)
    empty = b("Equal", x, zero)
    factors = b("Where", empty, one, x)
    nothing = b("Cast", empty, to=b.element_type())
    other_zeros = b("Sub", _reduced(b, "ReduceSum", nothing), nothing)
    product = b("Mul", spread(b, b.gradient()), _reduced(b, "ReduceProd", factors))
    yield 0, b.chosen(b("Equal", other_zeros, zero), b("Div", product, factors))


@gradient_rule("ReduceL1")
def sum_of_sizes(b: Backward) -> Gradients:
    yield 0, b("Mul", b("Sign", b.input(0)), spread(b, b.gradient()))


@gradient_rule("ReduceL2")
def root_of_squares(b: Backward) -> Gradients:
    """dx = dy x / y, and 0 if all elements are 0, as in PyTorch."""
    y = b.output(0)
    divisor = b("Where", b("Equal", y, b.number(0)), b.number(1), y)
    yield 0, b("Mul", b.input(0), spread(b, b("Div", b.gradient(), divisor)))


@gradient_rule("ReduceSumSquare")
def sum_of_squares(b: Backward) -> Gradients:
    yield 0, b("Mul", b.input(0), spread(b, b("Mul", b.gradient(), b.number(2))))


@gradient_rule("ReduceLogSum")
def logarithm_of_sum(b: Backward) -> Gradients:
    yield 0, _expanded(b, b("Div", b.gradient(), b("Exp", b.output(0))))


@gradient_rule("ReduceLogSumExp")
def logarithm_of_exponentials(b: Backward) -> Gradients:
    # The output is at least as large as each input, so that Exp cannot overflow.
    share = b("Exp", b("Sub", b.input(0), spread(b, b.output(0))))
    yield 0, b("Mul", share, spread(b, b.gradient()))


@gradient_rule("CumSum")
def running_sum(b: Backward) -> Gradients:
    """A running sum from the other end."""
    reverse, exclusive = 1 - b.attribute("reverse", 0), b.attribute("exclusive", 0)
    yield 0, b("CumSum", b.gradient(), b.input(1), reverse=reverse, exclusive=exclusive)


@division_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
      "ReduceProd")  # fmt: skip
def reduction_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut, rank, flags = input_cuts[0], len(s.shape(node.input[0])), attributes_of(node)
    if cut is None:
        raise s.unsupported(node)
    axes = s.axes(node, 1, rank)
    if axes is None and not flags.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    if cut.axis in (axes or []):
        if not s.scores or node.op_type != "ReduceSum":
            raise s.unsupported(node)
        s.plan.sums.add(place)
        return [None]
    gone = [] if flags.get("keepdims", 1) else [axis for axis in axes or [] if axis < cut.axis]
    return [cut.at(cut.axis - len(gone))]


@token_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
def reduction_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    listed = s.listed(node, 1, s.rank(node.input[0]))
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise Whole
    return [input_axes[0]]


@division_rule("CumSum")
def running_sum_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    """The same at each place along the other axes."""
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None or any(input_cuts[1:]):
        raise s.unsupported(node)
    axis = s.facts.constant(node.input[1])
    if axis is None or cut.axis == int(axis.reshape(-1)[0]) % rank:
        raise s.unsupported(node)
    return [cut]


describe(["ReduceMean", "ReduceSum"], Trait.KEEPS_TYPE)
describe(["ReduceMax", "ReduceProd", "ReduceSum"], Trait.GIVES_SIZES)
describe(["ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"], Trait.PASSES_STEEPNESS)
describe(
    ["ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"],
    Trait.FIRST_DIVIDED,
)
