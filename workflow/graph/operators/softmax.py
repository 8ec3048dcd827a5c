"""Softmax along an axis, and the cross-entropy. Forward nodes get the outputs that their gradients read."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.replacement import Replacement, attribute
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, axis_of, token_rule
from ortflow.workflow.graph.rules.size import Type, first_like_first, size_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Softmax")
def softmax(b: Backward) -> Gradients:
    yield 0, b("SoftmaxGrad_13", b.gradient(), b.output(0), domain=MICROSOFT, axis=b.attribute("axis", -1))


@composition("SoftmaxGrad_13")
def softmax_gradient(w: Replacement) -> None:
    """dx = y (dy - sum(y dy)), with the sum along the axis."""
    gradient, y = w.node.input
    product = w("Mul", gradient, y)
    total = w("ReduceSum", product, w.ints(w.attribute("axis", -1)), keepdims=1)
    w.done(w("Sub", product, w("Mul", y, total)))


@gradient_rule("LogSoftmax")
def log_softmax(b: Backward) -> Gradients:
    yield 0, _through_log_softmax(b, b.gradient(), b.output(0), b.attribute("axis", -1))


def _through_log_softmax(b: Backward, gradient: str, logarithms: str, axis: int) -> str:
    """dx = dy - exp(y) sum(dy), with the sum along the axis."""
    total = b("ReduceSum", gradient, b.ints(axis), keepdims=1)
    return b("Sub", gradient, b("Mul", b("Exp", logarithms), total))


@division_rule("Softmax", "LogSoftmax")
def softmax_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    (cut,) = input_cuts
    assert cut is not None
    if attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])) == cut.axis:
        if not s.scores or node.op_type != "LogSoftmax":
            raise s.unsupported(node)
        s.plan.normal[place] = cut
    return [cut]


@token_rule("Softmax", "LogSoftmax", "LpNormalization")
def softmax_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    if not input_axes[0] or axis_of(s, node) < input_axes[0]:
        raise Whole
    return [input_axes[0]]


@gradient_rule("SoftmaxCrossEntropyLoss")
def cross_entropy(b: Backward) -> Gradients:
    """The second output, the log-probabilities, may also be used by other nodes."""
    logarithms = b.saved_output(1)
    of_scores = ""
    if b.gradient():
        ignored = attribute(b.node, "ignore_index", None)
        flags = {} if ignored is None else {"ignore_index": ignored}
        inputs = [b.gradient(), logarithms, *(name for name in b.node.input[1:] if name)]
        reduction = b.attribute("reduction", "mean")
        of_scores = b("SoftmaxCrossEntropyLossGrad", *inputs, domain=MICROSOFT, reduction=reduction, **flags)
    if b.gradient(1):
        other = _through_log_softmax(b, b.gradient(1), logarithms, 1)
        of_scores = b("Add", of_scores, other) if of_scores else other
    yield 0, of_scores


@composition("SoftmaxCrossEntropyLossGrad")
def cross_entropy_gradient(w: Replacement) -> None:
    """Gradient of -log p[label] weight[label] with respect to the scores.

    It is (p - one hot) weight[label] dloss, divided by the sum of the weights for a mean. Ignored labels have weight 0.
    """
    gradient, logarithms, labels = w.node.input[:3]
    weights, ignored, reduction = w.input(3), w.attribute("ignore_index", None), w.attribute("reduction", "mean")
    weight, counted = "", ""
    if ignored is not None:
        is_int32 = shapes.element_type(w.context.types, labels) == TensorProto.INT32
        kind = "int32" if is_int32 else "int64"
        counted = w("Equal", labels, w.constant(ignored, kind))
        # PyTorch's -100 is not an index of the scores' axis: Gather and ScatterElements would fail.
        labels = w("Where", counted, w.constant(0, kind), labels)
    if weights:
        weight = w("Gather", weights, labels)
    if counted:
        weight = w("Where", counted, w.constant(0), weight or w.constant(1))
    if reduction == "mean":
        # If no label counts, the result is 0 / 0, as the loss is.
        total = w("ReduceSum", weight, keepdims=0) if weight else w("Cast", w("Size", labels), to=TensorProto.FLOAT)
        gradient = w("Div", gradient, total)
    row_gradient = w("Mul", gradient, weight) if weight else gradient
    if reduction != "none" and not weight:
        row_gradient = w("Expand", row_gradient, w("Shape", labels))
    row_gradient = w("Unsqueeze", row_gradient, w.ints(1))
    probabilities = w("Mul", w("Exp", logarithms), row_gradient)
    places = w("Unsqueeze", labels, w.ints(1))
    w.done(w("ScatterElements", probabilities, places, w("Neg", row_gradient), axis=1, reduction="add"))


@division_rule("SoftmaxCrossEntropyLoss")
def cross_entropy_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut = input_cuts[0]
    logs = node.output[1] if len(node.output) > 1 else ""
    if not s.scores or cut is None or cut.axis != 1 or any(input_cuts[1:]) or len(node.input) > 2:
        raise s.unsupported(node)
    if logs in s.facts.readers or logs in s.facts.outputs:
        raise s.unsupported(node)
    s.plan.entropies[place] = cut
    return [None]


@size_rule("CrossEntropy")
def sums_of_rows(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """The second output has one sum for each row of scores."""
    scores = types.get(node.input[1]) if place == 1 and len(node.input) > 1 else None
    return None if scores is None else (scores[0], scores[1][:1])


size_rule("Softmax", "SoftmaxGrad", "SoftmaxGrad_13")(first_like_first)
describe(["Softmax"], Trait.KEEPS_TYPE)
