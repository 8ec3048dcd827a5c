"""Rules for softmax, normalisations and cross-entropy. Forward nodes get the outputs that their gradients read."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.compose_norms import normalization_gradients
from ortflow.workflow.graph.autodiff.rule import Backward, Dims, Gradients, rule
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import attribute


@rule("Softmax")
def softmax(b: Backward) -> Gradients:
    yield 0, b("SoftmaxGrad_13", b.gradient(), b.output(0), domain=MICROSOFT, axis=b.attribute("axis", -1))


@rule("LogSoftmax")
def log_softmax(b: Backward) -> Gradients:
    yield 0, _through_log_softmax(b, b.gradient(), b.output(0), b.attribute("axis", -1))


def _through_log_softmax(b: Backward, gradient: str, logarithms: str, axis: int) -> str:
    """dx = dy - exp(y) sum(dy), with the sum along the axis."""
    total = b("ReduceSum", gradient, b.ints(axis), keepdims=1)
    return b("Sub", gradient, b("Mul", b("Exp", logarithms), total))


@rule("LayerNormalization")
def layer_normalization(b: Backward) -> Gradients:
    mean, inverse, rank = b.saved_output(1), b.saved_output(2), b.rank(0)
    axis = b.attribute("axis", -1) % rank
    sizes = (shapes.named_shape(b.context.types, b.input(0)) or [])[axis:]
    if all(_is_whole(b, name, sizes) for name in b.node.input[1:] if name):
        inputs = b.gradient(), b.input(0), b.input(1), mean, inverse
        gradients = b.several("LayerNormalizationGrad", 3, *inputs, domain=MICROSOFT, axis=axis)
        yield from enumerate(gradients[: len(b.node.input)])
        return
    yield from _broadcast_normalization(b, mean, inverse, range(axis - rank, 0))


def _is_whole(b: Backward, vector: str, sizes: Dims) -> bool:
    """Whether a scale or bias has the full size of the normalised axes, so that it is not broadcast.

    The kernel of onnxruntime-training does not support axes of one element.
    """
    dims = shapes.named_shape(b.context.types, vector) or []
    equal = dims == sizes and None not in sizes and set(sizes) != {1}
    return equal or (len(dims) == len(sizes) and all(isinstance(size, int) and size > 1 for size in dims))


@rule("SimplifiedLayerNormalization")
def root_mean_square_normalization(b: Backward) -> Gradients:
    inverse, rank = b.saved_output(1), b.rank(0)
    axis = b.attribute("axis", -1) % rank
    sizes = (shapes.named_shape(b.context.types, b.input(0)) or [])[axis:]
    if _is_whole(b, b.input(1), sizes):
        inputs = b.gradient(), b.input(0), b.input(1), inverse
        gradients = b.several("SimplifiedLayerNormalizationGrad", 2, *inputs, domain=MICROSOFT, axis=axis)
        yield from enumerate(gradients)
        return
    yield from _broadcast_normalization(b, "", inverse, range(axis - rank, 0))


def _broadcast_normalization(b: Backward, mean: str, inverse: str, axes: range) -> Gradients:
    x, scale, y = b.input(0), b.input(1), b.output(0)
    of_x, of_scale = normalization_gradients(b, b.gradient(), x, scale, mean, inverse, axes)
    if b.wants(0):
        yield 0, of_x
    if b.wants(1):
        yield 1, b.summed(of_scale, scale, y)
    if b.wants(2):
        yield 2, b.summed(b.gradient(), b.input(2), y)


@rule("SoftmaxCrossEntropyLoss")
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
