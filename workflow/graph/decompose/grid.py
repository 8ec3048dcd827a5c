"""GridSample by gathers: a weighted sum of the neighbours of each sampling point (Jaderberg et al. 2015).

By cubic interpolation there are four neighbours along each axis, with the weights of Keys (1981) for a = -0.75.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.replacement import Context, Replacement

_SPATIAL_FROM = 2
_A = -0.75
_STEPS = {"nearest": (0,), "bilinear": (0, 1), "linear": (0, 1), "bicubic": (-1, 0, 1, 2)}
"""Mode -> the neighbours along an axis, from the pixel at or before the point; `nearest`: from the nearest one."""


def grid_sample(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """GridSample with any number of axes. The grid has no gradient if the mode is nearest."""
    w = Replacement(node, context)
    mode = w.attribute("mode", "bilinear")
    if mode not in _STEPS:
        raise w.refusal(f"it interpolates by {mode!r}")
    axes = w.rank(0) - _SPATIAL_FROM
    sizes = [w("Squeeze", w("Shape", w.input(0), start=i, end=i + 1)) for i in range(2, 2 + axes)]
    # The grid's coordinates start with the last axis.
    places = [_place(w, sizes[i], axes - 1 - i, i) for i in range(axes)]
    value = ""
    for corner in itertools.product(_STEPS[mode], repeat=axes):
        part = _corner(w, places, sizes, corner, mode)
        value = w("Add", value, part) if value else part
    output_shape = [w("Shape", w.input(0), start=0, end=2), w("Shape", w.input(1), start=1, end=1 + axes)]
    return w.done(w("Reshape", value, w("Concat", *output_shape, axis=0)))


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
    if padding == "reflection" and w.shape(0)[_SPATIAL_FROM + axis] == 1:
        raise w.refusal("it reflects at the borders of an axis of length 1")
    if w.attribute("mode", "bilinear") == "bicubic":
        # Its neighbours are padded each, not the point.
        return place
    if padding == "reflection":
        lowest = w.constant(0.0 if aligned else -0.5)
        distance = w("Abs", w("Sub", place, lowest))
        turns = w("Cast", w("Div", distance, span), to=TensorProto.INT64)
        rest = w("Sub", distance, w("Mul", w("Cast", turns, to=TensorProto.FLOAT), span))
        odd = w("Equal", w("Mod", turns, w.constant(2, np.int64)), w.constant(1, np.int64))
        place = w("Add", w("Where", odd, w("Sub", span, rest), rest), lowest)
    if padding != "zeros":
        place = w("Clip", place, w.constant(0.0), w("Sub", length, one))
    return place


def _corner(w: Replacement, places: list[str], sizes: list[str], corner: tuple[int, ...], mode: str) -> str:
    """[batch, channels, points]: the pixels at one corner of each point's cell, times their weights."""
    index, weight = "", ""
    for place, size, step in zip(places, sizes, corner, strict=True):
        # Round goes to the even one of two pixels at equal distance, as PyTorch's nearbyint does.
        low = w("Cast", w("Round" if mode == "nearest" else "Floor", place), to=TensorProto.INT64)
        pixel = w("Add", low, w.constant(step, np.int64)) if step else low
        near = (
            "" if mode == "nearest" else _weight(w, w("Sub", place, w("Cast", low, to=TensorProto.FLOAT)), step, mode)
        )
        pixel, inside = _bounded(w, pixel, size, mode)
        if not near:
            near = w("Cast", inside, to=TensorProto.FLOAT)
        elif inside:
            near = w("Where", inside, near, w.constant(0.0))
        weight = w("Mul", weight, near) if weight else near
        index = w("Add", w("Mul", index, size), pixel) if index else pixel
    image = w("Reshape", w.input(0), w.ints(0, 0, -1))
    shape = w("Concat", w("Shape", image, start=0, end=2), w("Shape", index, start=1, end=2), axis=0)
    pixels = w("GatherElements", image, w("Expand", w("Unsqueeze", index, w.ints(1)), shape), axis=2)
    return w("Mul", pixels, w("Unsqueeze", weight, w.ints(1)))


def _weight(w: Replacement, beyond: str, step: int, mode: str) -> str:
    """The weight of a neighbour; `beyond` is the distance of the point from the pixel at or before it, 0 to 1."""
    if mode != "bicubic":
        return beyond if step else w("Sub", w.constant(1.0), beyond)
    distance = w("Abs", w("Sub", beyond, w.constant(float(step))))
    near = step in (0, 1)
    factors = [_A + 2, -(_A + 3), 0.0, 1.0] if near else [_A, -5 * _A, 8 * _A, -4 * _A]
    value = w.constant(factors[0])
    for factor in factors[1:]:
        value = w("Mul", value, distance)
        value = w("Add", value, w.constant(factor)) if factor else value
    return value


def _bounded(w: Replacement, pixel: str, size: str, mode: str) -> tuple[str, str]:
    """The pixel inside the image that is read for one, and the condition that it counts; empty if it always does."""
    zero, one, two = (w.constant(number, np.int64) for number in (0, 1, 2))
    last = w("Sub", size, one)
    padding = w.attribute("padding_mode", "zeros")
    inside = ""
    if mode != "bicubic" or padding == "zeros":
        inside = w("And", w("GreaterOrEqual", pixel, zero), w("Less", pixel, size))
    elif padding == "reflection":
        # Aligned, the pixels at the borders are not repeated.
        aligned = w.attribute("align_corners", 0)
        turn = w("Mul", last if aligned else size, two)
        pixel = w("Mod", pixel, turn)
        back = w("Sub", turn if aligned else w("Sub", turn, one), pixel)
        pixel = w("Where", w("Greater", pixel, last), back, pixel)
    return w("Min", w("Max", pixel, zero), last), inside
