"""GridSample by gathers: a weighted sum of the neighbours of each sampling point (Jaderberg et al. 2015)."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.replacement import Context, Replacement

_SPATIAL_FROM = 2


def grid_sample(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """GridSample with any number of axes, nearest or linear. The grid has a gradient only if linear."""
    w = Replacement(node, context)
    mode = w.attribute("mode", "bilinear")
    if mode not in ("nearest", "bilinear", "linear"):
        raise w.refusal(f"it interpolates by {mode!r}")
    axes = w.rank(0) - _SPATIAL_FROM
    sizes = [w("Squeeze", w("Shape", w.input(0), start=i, end=i + 1)) for i in range(2, 2 + axes)]
    # The grid's coordinates start with the last axis.
    places = [_place(w, sizes[i], axes - 1 - i, i) for i in range(axes)]
    value = ""
    for corner in itertools.product(*([0] if mode == "nearest" else [0, 1] for _ in range(axes))):
        part = _corner(w, places, sizes, corner, nearest=mode == "nearest")
        value = w("Add", value, part) if value else part
    whole = [w("Shape", w.input(0), start=0, end=2), w("Shape", w.input(1), start=1, end=1 + axes)]
    return w.done(w("Reshape", value, w("Concat", *whole, axis=0)))


def _place(w: Replacement, size: str, component: int, axis: int) -> str:
    """[batch, points]: the pixel coordinate of each sampling point along one axis of the image."""
    one, half = w.constant(1.0), w.constant(0.5)
    grid = w("Gather", w.input(1), w.constant(component, np.int64), axis=-1)
    grid = w("Reshape", grid, w.ints(0, -1))
    length = w("Cast", size, to=TensorProto.FLOAT)
    aligned = w.attribute("align_corners", 0)
    span = w("Sub", length, one) if aligned else length
    place = w("Mul", w("Mul", w("Add", grid, one), half), span)
    place = place if aligned else w("Sub", place, half)
    padding = w.attribute("padding_mode", "zeros")
    if padding == "reflection":
        if w.shape(0)[_SPATIAL_FROM + axis] == 1:
            raise w.refusal("it reflects at the borders of an axis of length 1")
        lowest = w.constant(0.0 if aligned else -0.5)
        distance = w("Abs", w("Sub", place, lowest))
        turns = w("Cast", w("Div", distance, span), to=TensorProto.INT64)
        rest = w("Sub", distance, w("Mul", w("Cast", turns, to=TensorProto.FLOAT), span))
        odd = w("Equal", w("Mod", turns, w.constant(2, np.int64)), w.constant(1, np.int64))
        place = w("Add", w("Where", odd, w("Sub", span, rest), rest), lowest)
    if padding != "zeros":
        place = w("Clip", place, w.constant(0.0), w("Sub", length, one))
    return place


def _corner(w: Replacement, places: list[str], sizes: list[str], corner: tuple[int, ...], *, nearest: bool) -> str:
    """[batch, channels, points]: the pixels at one corner of each point's cell, times their weights."""
    zero, one = w.constant(0, np.int64), w.constant(1, np.int64)
    index, weight = "", ""
    for place, size, step in zip(places, sizes, corner, strict=True):
        low = w("Cast", w("Round" if nearest else "Floor", place), to=TensorProto.INT64)
        pixel = w("Add", low, one) if step else low
        inside = w("And", w("GreaterOrEqual", pixel, zero), w("Less", pixel, size))
        if nearest:
            near = w("Cast", inside, to=TensorProto.FLOAT)
        else:
            beyond = w("Sub", place, w("Cast", low, to=TensorProto.FLOAT))
            near = w("Where", inside, beyond if step else w("Sub", w.constant(1.0), beyond), w.constant(0.0))
        weight = w("Mul", weight, near) if weight else near
        pixel = w("Min", w("Max", pixel, zero), w("Sub", size, one))
        index = w("Add", w("Mul", index, size), pixel) if index else pixel
    image = w("Reshape", w.input(0), w.ints(0, 0, -1))
    shape = w("Concat", w("Shape", image, start=0, end=2), w("Shape", index, start=1, end=2), axis=0)
    pixels = w("GatherElements", image, w("Expand", w("Unsqueeze", index, w.ints(1)), shape), axis=2)
    return w("Mul", pixels, w("Unsqueeze", weight, w.ints(1)))
