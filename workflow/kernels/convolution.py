"""The gradients of a convolution: see convolution.c."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.edit import MICROSOFT, attributes_of
from ortflow.workflow.kernels.rewriter import Rewriter

_MOST_AXES = 3
"""Spatial axes."""


def put(rewriter: Rewriter) -> None:
    """Replace the gradients of convolutions whose kernels have known sizes."""
    for node in rewriter.nodes("ConvGrad", MICROSOFT):
        gradient, data, weight = node.input[:3]
        dims = rewriter.dims(weight) or ()
        geometry = _geometry(node, dims)
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


def _geometry(node: onnx.NodeProto, weight: Sequence[object]) -> list[int] | None:
    """Groups, then kernel, strides, pads before, dilations of each spatial axis; None where something is not known."""
    kernel = [size for size in weight[2:] if isinstance(size, int)]
    axes = len(kernel)
    attributes = attributes_of(node)
    if not 1 <= axes <= _MOST_AXES or axes + 2 != len(weight):
        return None
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    pads = list(attributes.get("pads", []))[:axes] or [0] * axes
    strides, dilations = (list(attributes.get(name, [])) or [1] * axes for name in ("strides", "dilations"))
    return [int(attributes.get("group", 1)), *kernel, *strides, *pads, *dilations]
