"""Gradient operators of softmax, normalisations and the loss, in standard operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import TensorProto

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement


def softmax(w: Replacement) -> None:
    """dx = y (dy - sum(y dy)), with the sum along the axis."""
    gradient, y = w.node.input
    product = w("Mul", gradient, y)
    total = w("ReduceSum", product, w.ints(w.attribute("axis", -1)), keepdims=1)
    w.done(w("Sub", product, w("Mul", y, total)))


def normalization_gradients(
    w: Replacement, gradient: str, x: str, scale: str, mean: str, inverse: str, axes: Sequence[int]
) -> tuple[str, str]:
    """Gradients of y = n scale with n = (x - mean) inverse: that of x, and that of the scale before it is reduced.

    With g = dy scale and means over `axes`, which count from the end: dx = (g - mean(g) - n mean(g n)) inverse. Without
    `mean`, as in root mean square normalisation, the term mean(g) is omitted.
    """
    normal = w("Mul", w("Sub", x, mean) if mean else x, inverse)
    outer = w("Mul", gradient, normal)
    scaled = w("Mul", gradient, scale)
    along = w("ReduceMean", w("Mul", scaled, normal), w.ints(*axes), keepdims=1)
    rest = w("Sub", scaled, w("Mul", normal, along))
    if mean:
        rest = w("Sub", rest, w("ReduceMean", scaled, w.ints(*axes), keepdims=1))
    return w("Mul", rest, inverse), outer


def layer_norm(w: Replacement) -> None:
    """Gradients of x, scale and bias; the last two have the shape of x's last axes.

    Root mean square normalisation has neither mean nor bias.
    """
    gradient, x, scale, *means, inverse = w.node.input
    rank = shapes.rank(w.context.types, x)
    axis = w.attribute("axis", -1)
    if axis >= 0:
        if rank is None:
            raise w.refusal("the rank of its input is not known")
        axis -= rank
    dx, dscale = normalization_gradients(w, gradient, x, scale, "".join(means), inverse, range(axis, 0))
    gradients = [dx if w.output(0) else ""]
    for place, value in ((1, dscale), (2, gradient)):
        gradients.append(_over_rows(w, value, scale, axis, rank) if w.output(place) else "")
    w.done(*gradients)


def _over_rows(w: Replacement, value: str, scale: str, axis: int, rank: int | None) -> str:
    """Sum over all axes before `axis`, which counts from the end."""
    if rank is not None:
        before = list(range(rank + axis))
        return w("ReduceSum", value, w.ints(*before), keepdims=0) if before else value
    rows = w("Reshape", value, w("Concat", w.ints(-1), w("Shape", scale), axis=0))
    return w("ReduceSum", rows, w.ints(0), keepdims=0)


def cross_entropy(w: Replacement) -> None:
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
        # PyTorch's -100 is no place along the axis of the scores: Gather and ScatterElements would fail.
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


NORMS: dict[str, Callable[[Replacement], None]] = {
    "LayerNormalizationGrad": layer_norm,
    "SimplifiedLayerNormalizationGrad": layer_norm,
    "SoftmaxCrossEntropyLossGrad": cross_entropy,
    "SoftmaxGrad_13": softmax,
}
