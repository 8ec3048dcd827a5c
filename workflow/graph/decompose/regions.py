"""RoiAlign as products with matrices of interpolation weights, one along each axis of the image (He et al. 2017)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.replacement import Context, Replacement
from ortflow.workflow.graph.ir.stops import stop


def region_align(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """RoiAlign of [batch, channels, height, width] by [regions, 4]; the regions have no gradient, as in PyTorch.

    The maximum is that of the weighted neighbours, as ONNX Runtime computes it.
    """
    w = Replacement(node, context)
    samples = w.attribute("sampling_ratio", 0)
    if samples < 1:
        raise w.refusal("its number of samples depends on the regions; set sampling_ratio")
    mode = w.attribute("mode", "avg")
    regions = w.fresh("regions")
    w.nodes.append(stop(w.input(1), regions, f"{regions}/Identity"))
    images = w("Gather", w.input(0), w.input(2), axis=0)
    bins = [w.attribute(name, 1) for name in ("output_height", "output_width")]
    # A region is x, y, x, y.
    rows = _weights(w, images, regions, 1, 2, bins[0], samples, mode)
    columns = _weights(w, images, regions, 0, 3, bins[1], samples, mode)
    values = [
        w("MatMul", w("MatMul", row, images), w("Transpose", column, perm=[0, 1, 3, 2]))
        for row in rows
        for column in columns
    ]
    if mode == "avg":
        return w.done(values[0])
    largest = w("Max", *values)
    apart = w("Reshape", largest, w.ints(0, 0, bins[0], samples, bins[1], samples))
    return w.done(w("ReduceMax", apart, w.ints(3, 5), keepdims=0))


def _weights(
    w: Replacement, images: str, regions: str, side: int, axis: int, bins: int, samples: int, mode: str
) -> list[str]:
    """[regions, 1, bins, length]: the share of each pixel in each bin along one axis of the image.

    For a maximum two of [regions, 1, bins * samples, length]: of the pixel before each sample, and of the one after it.
    """
    one, zero = w.constant(1.0), w.constant(0.0)
    half = w.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    scale = w.constant(w.attribute("spatial_scale", 1.0))
    start, end = (w("Mul", w("Slice", regions, w.ints(i), w.ints(i + 1), w.ints(1)), scale) for i in (side, side + 2))
    if half:
        start, end = (w("Sub", value, w.constant(0.5)) for value in (start, end))
    extent = w("Sub", end, start)
    # `output_half_pixel`, torchvision's aligned=False, makes each region at least a pixel wide; `half_pixel` does not.
    extent = extent if half else w("Max", extent, one)
    # In bins from the region's start, as [1, bins * samples].
    within = (np.arange(bins * samples)[None] + 0.5) / samples / bins
    place = w("Add", start, w("Mul", extent, w.constant(within)))
    length = w("Cast", w("Shape", images, start=axis, end=axis + 1), to=TensorProto.FLOAT)
    outside = w("Or", w("Less", place, w.constant(-1.0)), w("Greater", place, length))
    place = w("Min", w("Max", place, zero), w("Sub", length, one))
    pixels = w("Range", zero, w("Squeeze", length), one)
    shares = w("Relu", w("Sub", one, w("Abs", w("Sub", w("Unsqueeze", place, w.ints(2)), pixels))))
    shares = w("Where", w("Unsqueeze", outside, w.ints(2)), zero, shares)
    shares = w("Unsqueeze", shares, w.ints(1))
    if mode == "avg":
        grouped = w("Reshape", shares, w("Concat", w.ints(0, 1, bins, samples), w("Shape", pixels), axis=0))
        return [w("ReduceMean", grouped, w.ints(3), keepdims=0)]
    before = w("Unsqueeze", w("Floor", place), w.ints(1, 3))
    return [w("Where", w("Equal", pixels, at), shares, zero) for at in (before, w("Add", before, one))]
