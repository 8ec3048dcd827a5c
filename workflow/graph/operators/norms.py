"""Normalisation over the last axes. Forward nodes get the outputs that their gradients read."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.rules.composition import composition
from ortflow.workflow.graph.rules.gradient import Backward, Dims, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, axis_of, token_rule
from ortflow.workflow.graph.rules.size import first_like_first, size_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, weights


@gradient_rule("LayerNormalization")
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
    """Whether a scale or bias has the full size of the normalised axes, so that it is not broadcast."""
    dims = shapes.named_shape(b.context.types, vector) or []
    # The kernel of onnxruntime-training does not support axes of one element.
    equal = dims == sizes and None not in sizes and set(sizes) != {1}
    return equal or (len(dims) == len(sizes) and all(isinstance(size, int) and size > 1 for size in dims))


@gradient_rule("SimplifiedLayerNormalization")
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


@composition("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad")
def layer_norm_gradients(w: Replacement) -> None:
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


@division_rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def normalization_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    cut = input_cuts[0]
    if cut is None or any(input_cuts[1:]) or len(node.output) > 1:
        raise s.unsupported(node)
    if cut.axis >= attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])):
        raise s.unsupported(node)
    for slot in range(1, len(node.input)):
        s.copy(place, slot)
    return [cut]


@token_rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def normalization_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    axes = input_axes[0]
    statistics_read = any(name in s.facts.readers or name in s.facts.outputs for name in node.output[1:])
    if not axes or any(input_axes[1:]) or statistics_read or axis_of(s, node) < axes:
        raise Whole
    s.found.copied |= {(place, slot) for slot in range(1, len(node.input)) if node.input[slot]}
    return [axes]


size_rule("LayerNormalization", "LayerNormalizationGrad", "SimplifiedLayerNormalization")(first_like_first)
weights(["LayerNormalization"], 1, 2)
weights(["SimplifiedLayerNormalization", "RMSNormalization"], 1)
weights(["SkipLayerNormalization"], 2, 3, 4)
weights(["SkipSimplifiedLayerNormalization"], 2, 3)
describe(["LayerNormalization", "SimplifiedLayerNormalization"], Trait.FIRST_DIVIDED)
