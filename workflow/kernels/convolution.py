"""Convolutions of few channels, and the gradients of all: see convolution.c."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx

from ortflow.workflow.graph.edit import MICROSOFT, attributes_of
from ortflow.workflow.kernels.rewriter import Rewriter

_MOST_AXES = 3
"""Spatial axes."""
_DIRECT = 16
"""As in convolution.c."""
MOST_PLACES = 256
"""As in planes.h."""


def put(rewriter: Rewriter) -> None:
    """Replace what fits, where the kernels have known sizes."""
    _put_gradients(rewriter)
    _put_forward(rewriter)
    _put_transposed(rewriter)


def _put_gradients(rewriter: Rewriter) -> None:
    for node in rewriter.nodes("ConvGrad", MICROSOFT):
        gradient, data, weight = node.input[:3]
        dims = rewriter.dims(weight) or ()
        geometry = geometry_of(node, dims[2:])
        if geometry is None or not all(rewriter.fits(name) for name in (data, weight)):
            continue
        of_data, of_weight, of_bias = [*node.output, "", ""][:3]
        described = rewriter.integers_named(*geometry)
        rewriter.drop(node)
        # First what nothing waits for: its inputs can be freed before the walk goes on.
        if of_weight:
            rewriter.add("ConvWeightGrad", [described, gradient, data], [of_weight])
        if of_bias:
            others = [0, *range(2, len(dims))]
            rewriter.plain("ReduceSum", [gradient, rewriter.integers_named(*others)], of_bias, keepdims=0)
        if of_data:
            shape = rewriter.plain("Shape", [data], f"{of_data}/shape")
            rewriter.add("ConvDataGrad", [described, shape, gradient, weight], [of_data])


def _put_forward(rewriter: Rewriter) -> None:
    for node in rewriter.nodes("Conv"):
        dims = rewriter.dims(node.input[1]) or ()
        geometry = geometry_of(node, dims[2:])
        if geometry is None or geometry[0] == 1 or not _is_direct(node, dims):
            continue
        if not all(map(rewriter.fits, node.input)):
            continue
        axes = len(dims) - 2
        behind = list(attributes_of(node).get("pads", []))[axes:] or [0] * axes
        given = [rewriter.integers_named(*geometry), rewriter.integers_named(*behind), *node.input]
        rewriter.drop(node)
        rewriter.add("Conv", given, list(node.output))


def _put_transposed(rewriter: Rewriter) -> None:
    """A transposed convolution is the gradient of one with respect to its data; that of average pooling is one."""
    for node in rewriter.nodes("ConvTranspose"):
        x, weight = node.input[:2]
        constant, made = rewriter.constant(weight), rewriter.dims(node.output[0]) or ()
        dims = (rewriter.dims(weight) if constant is None else constant.shape) or ()
        geometry = geometry_of(node, dims[2:])
        sizes = [size for size in made[2:] if isinstance(size, int)]
        if geometry is None or not _is_direct(node, dims) or len(sizes) + 2 != len(dims):
            continue
        if len(node.input) > 2 or "output_shape" in attributes_of(node) or not rewriter.fits(x):
            continue
        channels = int(dims[1] or 0) * geometry[0]
        rewriter.drop(node)
        batch = rewriter.plain("Shape", [x], f"{node.output[0]}/batch", start=0, end=1)
        rest = rewriter.integers_named(channels, *sizes)
        shape = rewriter.plain("Concat", [batch, rest], f"{node.output[0]}/shape", axis=0)
        rewriter.add("ConvDataGrad", [rewriter.integers_named(*geometry), shape, x, weight], list(node.output))


def _is_direct(node: onnx.NodeProto, weight: Sequence[object]) -> bool:
    """Its groups have so few channels that the kernels compute it without a matrix product."""
    first, channels = weight[:2]
    if not isinstance(first, int) or not isinstance(channels, int):
        return False
    places = prod(size for size in weight[2:] if isinstance(size, int))
    return first // int(attributes_of(node).get("group", 1)) * channels <= _DIRECT and places <= MOST_PLACES


def geometry_of(node: onnx.NodeProto, sizes: Sequence[object]) -> list[int] | None:
    """Groups, then kernel, strides, pads before, dilations of each spatial axis; None where something is not known."""
    kernel = [size for size in sizes if isinstance(size, int)]
    axes = len(kernel)
    attributes = attributes_of(node)
    if not 1 <= axes <= _MOST_AXES or axes != len(sizes):
        return None
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    pads = list(attributes.get("pads", []))[:axes] or [0] * axes
    strides, dilations = (list(attributes.get(name, [])) or [1] * axes for name in ("strides", "dilations"))
    return [int(attributes.get("group", 1)), *kernel, *strides, *pads, *dilations]
