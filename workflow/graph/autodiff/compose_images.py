"""Gradients of look-ups, convolutions and batch normalisation in ONNX operators; see `compose`."""

from __future__ import annotations

from collections.abc import Callable

from ortflow.workflow.graph.autodiff.channel_norms import by_batch_gradients
from ortflow.workflow.graph.autodiff.convolutions import (
    bias_gradient,
    data_gradient,
    kernel_of,
    weight_gradient,
)
from ortflow.workflow.graph.autodiff.indexing import gathered_back
from ortflow.workflow.graph.autodiff.pooling import by_indices
from ortflow.workflow.graph.autodiff.windows import sizes_of, windows_of
from ortflow.workflow.graph.ir.replacement import Replacement


def gather(w: Replacement) -> None:
    """GatherGrad(shape, indices, gradient): add the gradient's rows to zeros."""
    shape, indices, gradient = w.node.input
    w.done(gathered_back(w, shape, indices, gradient, w.attribute("axis", 0)))


def convolution(w: Replacement) -> None:
    """ConvGrad(gradient, data, weight)."""
    gradient, x, weight = w.node.input
    kernel, group = kernel_of(w, 2), w.attribute("group", 1)
    windows, *_ = windows_of(w, x, kernel, sizes_of(w, x, len(kernel)))
    # Gradients of parameters come first: no other node then needs what they read.
    of_bias = bias_gradient(w, gradient, len(kernel)) if w.output(2) else ""
    of_weight = weight_gradient(w, gradient, x, weight, windows, group) if w.output(1) else ""
    of_data = data_gradient(w, gradient, weight, windows, x, group) if w.output(0) else ""
    w.done(of_data, of_weight, of_bias)


def batch_normalization(w: Replacement) -> None:
    """BatchNormalizationGrad(gradient, data, scale, mean, inverse standard deviation)."""
    gradient, x, scale, mean, inverse = w.node.input
    w.done(*by_batch_gradients(w, gradient, x, scale, mean, inverse))


def max_pool(w: Replacement) -> None:
    """MaxPoolGrad(gradient, data, indices), with the attributes of the pooling."""
    w.done(by_indices(w, *w.node.input))


IMAGES: dict[str, Callable[[Replacement], None]] = {
    "BatchNormalizationGrad": batch_normalization,
    "ConvGrad": convolution,
    "GatherGrad": gather,
    "MaxPoolGrad": max_pool,
}
