"""Group normalisation, as `group_norm` inserts it, and its gradient, in standard operators; see `compose`.

Values of a group are [batch, groups, values], those of a channel [batch, channels, pixels].
"""

from __future__ import annotations

import math

import numpy as np

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.rules.composition import composition

_VALUES = 2


@composition("GroupNormalization")
def group_norm(w: Replacement) -> None:
    """y = (x - mean) inverse scale + bias and, if requested, mean and inverse."""
    x, scale, bias = w.node.input
    groups, epsilon = w.attribute("num_groups", 1), w.attribute("epsilon", 1e-5)
    rows = w("Reshape", x, w.ints(0, groups, -1))
    mean = inverse = ""
    if w.output(1):
        mean = w("ReduceMean", rows, w.ints(_VALUES), keepdims=1)
        centred = w("Sub", rows, mean)
        variance = w("ReduceMean", w("Mul", centred, centred), w.ints(_VALUES), keepdims=1)
        inverse = w("Reciprocal", w("Sqrt", w("Add", variance, w.constant(epsilon))))
        normal = w("Mul", centred, inverse)
    else:
        # ONNX's InstanceNormalization needs a scale and a bias, here of each group.
        placeholders = w.constant(np.ones(groups)), w.constant(np.zeros(groups))
        normal = w("InstanceNormalization", rows, *placeholders, epsilon=epsilon)
    normalised = _channels(w, normal, scale, groups)
    moved = w("Add", w("Mul", normalised, _column(w, scale)), _column(w, bias))
    w.done(w("Reshape", moved, w("Shape", x)), mean, inverse)


@composition("GroupNormalizationGrad")
def group_norm_gradient(w: Replacement) -> None:
    """With n = (x - mean) inverse, g = dy scale and means over a group: dx = (g - mean(g) - n mean(g n)) inverse.

    Both means are computed from sums over channels, which the gradients of scale and bias also use.
    """
    gradient, x, scale, mean, inverse = w.node.input
    groups = w.attribute("num_groups", 1)
    rows = _channels(w, gradient, scale, 0)
    normal = w("Mul", w("Sub", w("Reshape", x, w.ints(0, groups, -1)), mean), inverse)
    values, last = w.ints(_VALUES), _column(w, scale)
    across = w("ReduceSum", rows, values, keepdims=1)
    along = w("ReduceSum", w("Mul", rows, _channels(w, normal, scale, groups)), values, keepdims=1)
    share = w("Div", w("Cast", w("Size", mean), to=1), w("Cast", w("Size", x), to=1))

    def mean_over_group(sums: str) -> str:
        """From sums over channels [batch, channels, 1], multiplied by the scale: the mean over each group [batch,
        groups, 1].
        """
        split = w("Reshape", w("Mul", sums, last), w.ints(0, groups, -1))
        return w("Mul", w("Mul", w("ReduceSum", split, values, keepdims=1), share), inverse)

    slope = w("Reshape", w("Mul", inverse, w("Reshape", scale, w.ints(groups, -1))), w("Shape", across))
    steep = w("Reshape", w("Mul", rows, slope), w("Shape", normal))
    rest = w("Add", w("Mul", normal, mean_over_group(along)), mean_over_group(across))
    dx = w("Reshape", w("Sub", steep, rest), w("Shape", x))
    w.done(dx, *(w("ReduceSum", sums, w.ints(0, _VALUES), keepdims=0) for sums in (along, across)))


def _channels(w: Replacement, value: str, scale: str, groups: int) -> str:
    """A value as [batch, channels, pixels]. It already has that form if there are as many groups as channels."""
    count = math.prod(size or 0 for size in shapes.shape(w.context.types, scale) or [0])
    return value if groups == count else w("Reshape", value, w.ints(0, count, -1))


def _column(w: Replacement, vector: str) -> str:
    """A per-channel vector as [channels, 1]."""
    return w("Reshape", vector, w.ints(-1, 1))
