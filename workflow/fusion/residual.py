"""Adds a gradient inside the node that computes another gradient of the same value: one kernel and one rounding less.

A residual block computes x + f(norm(x)), so the gradient of x is the sum of the norm's and of the block's own gradient.
That of a table that is also the weight of the head is the sum of the look-up's and of the head's. Pure.
Called by step `configure` for half precision, on the fp32 graph with our operators.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter

_INPUTS = {"LayerNormalizationGrad": 5, "RMSNormalizationGrad": 4, "TableGrad": 2}
"""Gradient -> number of its inputs without what is added, which follows them."""


def add_residuals(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which the node of a norm's or a table's gradient computes its sum with another value of its shape."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = Rewriter(copy.graph, CUDA_DOMAIN)
    for add in rewriter.nodes("Add"):
        for dx, residual in (add.input, reversed(add.input)):
            gradient = rewriter.maker(dx)
            if gradient is not None and _fits(rewriter, gradient, dx, residual):
                # In a kernel of its own the sum reads two tensors, writes one and rounds dx once more, 24 times a step
                # of GPT-2.
                rewriter.drop(add, gradient)
                outputs = [add.output[0], *gradient.output[1:]]
                rewriter.add(gradient.op_type, [*gradient.input, residual], outputs, **attributes_of(gradient))
                break
    rewriter.finish()
    return copy


def _fits(rewriter: Rewriter, gradient: onnx.NodeProto, dx: str, residual: str) -> bool:
    """Whether dx is only read by the sum, and the residual has its shape and does not depend on it."""
    if (
        gradient.domain != CUDA_DOMAIN
        or len(gradient.input) != _INPUTS.get(gradient.op_type)
        or gradient.output[0] != dx
    ):
        return False
    if rewriter.only_reader(dx) is None or dx == residual:
        return False
    dims = rewriter.dims(residual)
    # A name may stand for any size, but for the same one wherever it occurs.
    if dims is None or None in dims or dims not in (rewriter.dims(dx), rewriter.dims(gradient.input[1])):
        return False
    # It could still be computed from the gradient of scale or bias.
    return rewriter.is_fp32(residual) and id(gradient) not in rewriter.needed_by([residual])
