"""Convolutions, transposed convolutions and their gradients; see convolution.c."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter

_MOST_AXES = 3
"""Largest number of spatial axes."""
_DIRECT = 16
"""As in convolution.c."""
_SHALLOW = 64
"""With fewer products per output element, ONNX Runtime's kernel is as fast."""
MOST_PLACES = 256
"""As in planes.h."""


def put(rewriter: Rewriter) -> None:
    """Replace the nodes whose kernel sizes are known and supported."""
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
        described = rewriter.ints(*geometry)
        rewriter.drop(node)
        # First the gradient that no other node reads: its inputs can be freed earlier.
        if of_weight:
            rewriter.add("ConvWeightGrad", [described, gradient, data], [of_weight])
        if of_bias:
            axes = [0, *range(2, len(dims))]
            rewriter("ReduceSum", gradient, rewriter.ints(*axes), output=of_bias, keepdims=0)
        if of_data:
            shape = rewriter("Shape", data, output=f"{of_data}/shape")
            rewriter.add("ConvDataGrad", [described, shape, gradient, weight], [of_data])


def _put_forward(rewriter: Rewriter) -> None:
    for node in rewriter.nodes("Conv"):
        dims = rewriter.dims(node.input[1]) or ()
        geometry = geometry_of(node, dims[2:])
        if geometry is None or not _fits(dims, geometry[0]):
            continue
        if not (_is_deep(dims) or (geometry[0] > 1 and _is_direct(dims, geometry[0]))):
            continue
        if not all(rewriter.fits(name) for name in node.input if name):
            continue
        axes = len(dims) - 2
        behind = list(attributes_of(node).get("pads", []))[axes:] or [0] * axes
        described = rewriter.ints(*geometry), rewriter.ints(*behind)
        inputs = [*described, *(name for name in node.input if name)]
        rewriter.drop(node)
        rewriter.add("Conv", inputs, list(node.output))


def _put_transposed(rewriter: Rewriter) -> None:
    """Replace transposed convolutions: each is the gradient of a convolution with respect to its data.

    The gradient of average pooling is one, too.
    """
    for node in rewriter.nodes("ConvTranspose"):
        x, weight, *bias = (name for name in node.input if name)
        constant, made = rewriter.value(weight), rewriter.dims(node.output[0]) or ()
        dims = (rewriter.dims(weight) if constant is None else constant.shape) or ()
        geometry = geometry_of(node, dims[2:])
        sizes = [size for size in made[2:] if isinstance(size, int)]
        if geometry is None or len(sizes) + 2 != len(dims) or not _fits(dims, geometry[0]):
            continue
        if "output_shape" in attributes_of(node) or not all(rewriter.fits(name) for name in (x, *bias)):
            continue
        channels = int(dims[1] or 0) * geometry[0]
        rewriter.drop(node)
        batch = rewriter("Shape", x, output=f"{node.output[0]}/batch", start=0, end=1)
        rest = rewriter.ints(channels, *sizes)
        shape = rewriter("Concat", batch, rest, output=f"{node.output[0]}/shape", axis=0)
        inputs = [rewriter.ints(*geometry), shape, x, weight, *bias]
        rewriter.add("ConvDataGrad", inputs, list(node.output))


def _fits(weight: Sequence[object], groups: int) -> bool:
    """Whether the sizes are known, and the matrix products would not consist mostly of padding."""
    fixed = all(isinstance(size, int) for size in weight)
    return fixed and (not _is_direct(weight, groups) or _places(weight) <= MOST_PLACES)


def _is_direct(weight: Sequence[object], groups: int) -> bool:
    """Whether the groups have so few channels that the kernels compute it without a matrix product."""
    first, channels = (size for size in weight[:2] if isinstance(size, int))
    return first // groups * channels <= _DIRECT


def _is_deep(weight: Sequence[object]) -> bool:
    channels = weight[1]
    return isinstance(channels, int) and channels * _places(weight) >= _SHALLOW


def _places(weight: Sequence[object]) -> int:
    return prod(size for size in weight[2:] if isinstance(size, int))


def geometry_of(node: onnx.NodeProto, sizes: Sequence[object]) -> list[int] | None:
    """Groups, then kernel, strides, pads before and dilations of each spatial axis; None if one is unknown."""
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
