"""Elementwise operators: each element of the result comes from one of each input.

Rules by which they act on divided inputs, and on shares of the tokens (`_of_tokens`).
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.division import sequence, spread
from ortflow.workflow.graph.division.cut import Cut
from ortflow.workflow.graph.division.sequence import Shares
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.domains import MICROSOFT


@spread.rule(
    "Abs", "Acos", "Asin", "Atan", "Cast", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal",
    "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
    "ThresholdedRelu",
)  # fmt: skip
def _unary(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    return input_cuts


@spread.rule(
    "Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip
def _broadcast(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    ranks = [len(s.shape(name)) for name in node.input]
    rank = max(ranks)
    positions = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(input_cuts) if cut is not None}
    if len(positions) > 1:
        raise s.unsupported(node)
    return [met(s, place, node, input_cuts, positions.pop(), rank)]


def met(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given, cut: Cut, rank: int) -> Cut:
    """The cut of the result. Undivided inputs are broadcast, or read in part."""
    for slot, name in enumerate(node.input):
        if input_cuts[slot] is not None or not name:
            continue
        beside(s, place, slot, cut, rank)
    return cut


def beside(s: spread.Spread, place: int, slot: int, cut: Cut, rank: int) -> None:
    """The undivided input of an operator that broadcasts to `rank` axes, of which `cut` is divided."""
    shape = s.shape(s.facts.nodes[place].input[slot])
    axis = cut.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        s.copy(place, slot)
    elif shape[axis] == cut.length:
        s.demand(place, slot, cut.at(axis))
    else:
        raise s.unsupported(s.facts.nodes[place])


@spread.rule("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain=MICROSOFT)
def _gelu(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    return _broadcast(s, place, node, input_cuts)


@spread.rule("Clip")
def _clip(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    if any(input_cuts[1:]):
        raise s.unsupported(node)
    return [input_cuts[0]]


@spread.rule("Dropout")
def _dropout(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    # `rewrite` draws the whole mask and takes this part's share.
    if any(input_cuts[1:]) or input_cuts[0] is None or input_cuts[0].varies:
        raise s.unsupported(node)
    return [input_cuts[0]] * len(node.output)


@sequence.rule(
    "Abs", "Add", "Cast", "Ceil", "Celu", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean",
    "Min", "Mish", "Mul", "Neg", "Not", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tanh", "Where",
)  # fmt: skip
def _elementwise_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    counts = {axes for axes in input_axes if axes}
    shape = s.known(node.output[0])
    if len(counts) > 1:
        raise sequence.Whole
    (axes,) = counts
    for slot, name in enumerate(node.input):
        if input_axes[slot]:
            # What is broadcast along the tokens has no share of them.
            if s.rank(name) != len(shape[0]) or s.tokens(name, axes) != s.tokens(node.output[0], axes):
                raise sequence.Whole
        elif name:
            s.beside(place, slot, shape, axes)
    return [axes]


@sequence.rule("Gelu", "FastGelu", "QuickGelu", domain=MICROSOFT)
def _gelu_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    return _elementwise_of_tokens(s, place, node, input_axes)


@sequence.rule("Dropout")
def _dropout_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    # `sequence_graph` draws the whole mask and takes this part's share.
    if any(input_axes[1:]):
        raise sequence.Whole
    return [input_axes[0]] * len(node.output)
