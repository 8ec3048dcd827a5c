"""Normalisations computed from means and deviations, which are more accurate than E[x^2] - E[x]^2.

Formulas: the definitions of the ONNX operators.
"""

from __future__ import annotations

import numpy as np
import onnx

from ortflow.workflow.graph.ir.replacement import LAST, Context, Replacement

_WIDEST = 256
"""Largest window of local response normalisation, in channels; each channel of it needs a slice."""


def _per_channel(w: Replacement, vector: str, rank: int) -> str:
    """Reshape a vector over the channels, axis 1 of `rank`, so that it broadcasts."""
    return w("Unsqueeze", vector, w.ints(*range(1, rank - 1))) if rank > 2 else vector


def group_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Standardise each group of channels (Wu & He 2018), in the form that exporters write for older opsets.

    Scale and bias have one element per group in opset 18, and one per channel from opset 21 on.
    """
    w = Replacement(node, context)
    groups, epsilon = w.attribute("num_groups", 1), w.attribute("epsilon", 1e-5)
    grouped, shape = w("Reshape", w.input(0), w.ints(0, groups, -1)), w("Shape", w.input(0))
    if w.shape(1)[:1] == [groups]:
        return w.done(w("Reshape", w("InstanceNormalization", grouped, *node.input[1:3], epsilon=epsilon), shape))
    placeholders = w.constant(np.ones(groups)), w.constant(np.zeros(groups))
    y = w("Reshape", w("InstanceNormalization", grouped, *placeholders, epsilon=epsilon), shape)
    scale, bias = (_per_channel(w, vector, w.rank(0)) for vector in node.input[1:3])
    return w.done(w("Add", w("Mul", y, scale), bias))


def rms_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x / sqrt(mean of squares + epsilon) times scale (Zhang & Sennrich 2019), in the form that ONNX Runtime fuses."""
    w = Replacement(node, context)
    axis = w.attribute("axis", -1)
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis - w.rank(0), 0))
    squares = w("ReduceMean", w("Pow", w.input(0), w.constant(2.0)), w.ints(*axes), keepdims=1)
    root = w("Sqrt", w("Add", squares, w.constant(w.attribute("epsilon", 1e-5))))
    return w.done(w("Mul", w("Div", w.input(0), root), w.input(1)))


def mean_variance_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """(x - mean) / (standard deviation + 1e-9), over axes 0, 2 and 3 by default."""
    w = Replacement(node, context)
    axes = w.ints(*w.attribute("axes", [0, 2, 3]))
    deviation = w("Sub", w.input(0), w("ReduceMean", w.input(0), axes, keepdims=1))
    variance = w("ReduceMean", w("Mul", deviation, deviation), axes, keepdims=1)
    return w.done(w("Div", deviation, w("Add", w("Sqrt", variance), w.constant(1e-9))))


def lp_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x divided by its 1- or 2-norm along an axis."""
    w = Replacement(node, context)
    axis = w.ints(w.attribute("axis", -1))
    if w.attribute("p", 2) == 1:
        norm = w("ReduceSum", w("Abs", w.input(0)), axis, keepdims=1)
    else:
        norm = w("ReduceL2", w.input(0), axis, keepdims=1)
    return w.done(w("Div", w.input(0), norm))


def local_response_normalization(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x / (bias + alpha / size * sum of squares over `size` neighbouring channels) ^ beta (Krizhevsky et al. 2012)."""
    w = Replacement(node, context)
    size, rank = w.attribute("size", 1), w.rank(0)
    if size > _WIDEST:
        raise w.refusal(f"its window is {size} channels")
    before, after = (size - 1) // 2, size // 2
    pads = [0] * (2 * rank)
    pads[1], pads[rank + 1] = before, after
    squares = w("Pad", w("Mul", w.input(0), w.input(0)), w.ints(*pads))
    total = ""
    for place in range(size):
        # The last slice of the window ends where the padding does; the others end that many channels earlier.
        end = place - size + 1
        ends = w.ints(end if end else LAST)
        part = w("Slice", squares, w.ints(place), ends, w.ints(1))
        total = w("Add", total, part) if total else part
    scale = w.constant(w.attribute("alpha", 1e-4) / size)
    base = w("Add", w("Mul", total, scale), w.constant(w.attribute("bias", 1.0)))
    return w.done(w("Div", w.input(0), w("Pow", base, w.constant(w.attribute("beta", 0.75)))))


NORMS = {
    "GroupNormalization": group_normalization,
    "RMSNormalization": rms_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
    "LpNormalization": lp_normalization,
    "LRN": local_response_normalization,
}
