"""How operators act on shares of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.division.sequence import Given, Search, Whole, reshaped_axes, rule
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of

Made = Sequence[int | None]


@rule(
    "Abs", "Add", "Cast", "Ceil", "Celu", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean",
    "Min", "Mish", "Mul", "Neg", "Not", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tanh", "Where",
)  # fmt: skip
def _elementwise(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    found = {axes for axes in given if axes}
    shape = s.known(node.output[0])
    if len(found) > 1:
        raise Whole
    (axes,) = found
    for slot, name in enumerate(node.input):
        if given[slot]:
            # What is broadcast along the tokens has no share of them.
            if s.rank(name) != len(shape[0]) or s.tokens(name, axes) != s.tokens(node.output[0], axes):
                raise Whole
        elif name:
            s.beside(place, slot, shape, axes)
    return [axes]


@rule("Gelu", "FastGelu", "QuickGelu", domain=MICROSOFT)
def _gelu(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    return _elementwise(s, place, node, given)


@rule("Dropout")
def _dropout(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    # `sequence_graph` draws the whole mask and takes this part's share.
    if any(given[1:]):
        raise Whole
    return [given[0]] * len(node.output)


@rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def _norm(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    axes = given[0]
    more = any(name in s.facts.readers or name in s.facts.outputs for name in node.output[1:])
    if not axes or any(given[1:]) or more or _axis(s, node) < axes:
        raise Whole
    s.found.copied |= {(place, slot) for slot in range(1, len(node.input)) if node.input[slot]}
    return [axes]


@rule("Softmax", "LogSoftmax", "LpNormalization")
def _along_an_axis(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    if not given[0] or _axis(s, node) < given[0]:
        raise Whole
    return [given[0]]


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
def _reduce(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    listed = s.listed(node, 1, s.rank(node.input[0]))
    if not given[0] or any(given[1:]) or not listed or min(listed) < given[0]:
        raise Whole
    return [given[0]]


@rule("Reshape")
def _reshape(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    if not given[0] or any(given[1:]):
        raise Whole
    made = reshaped_axes(s, node, given[0])
    if made > given[0] and s.facts.value(node.input[1]) is None:
        raise Whole
    return [made]


@rule("Transpose")
def _transpose(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    axes, order = given[0], attributes_of(node).get("perm")
    if not axes or order is None or list(order[:axes]) != list(range(axes)):
        raise Whole
    return [axes]


@rule("Squeeze", "Unsqueeze")
def _squeeze(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    rank = max(s.rank(node.input[0]), s.rank(node.output[0]))
    listed = s.listed(node, 1, rank)
    if not given[0] or any(given[1:]) or not listed or min(listed) < given[0]:
        raise Whole
    return [given[0]]


@rule("Split")
def _split(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    if not given[0] or any(given[1:]) or _axis(s, node, 0) < given[0]:
        raise Whole
    return [given[0]] * len(node.output)


@rule("Slice")
def _slice(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    listed = s.listed(node, 3, s.rank(node.input[0])) if len(node.input) > 3 else None
    if not given[0] or any(given[1:]) or not listed or min(listed) < given[0]:
        raise Whole
    return [given[0]]


@rule("Concat")
def _concat(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    if not given[0] or len(set(given)) > 1 or _axis(s, node) < given[0]:
        raise Whole
    return [given[0]]


@rule("Shape")
def _shape(s: Search, place: int, node: onnx.NodeProto, given: Given) -> Made:
    # `sequence_graph` computes the sizes of the whole.
    return [None]


def _axis(s: Search, node: onnx.NodeProto, default: int = -1) -> int:
    return int(attributes_of(node).get("axis", default)) % s.rank(node.input[0])
