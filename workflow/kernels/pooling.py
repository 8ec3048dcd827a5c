"""The gradient of max pooling; see pooling.c."""

from __future__ import annotations

from math import prod

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.kernels.convolution import MOST_PLACES, geometry_of


def put(rewriter: Rewriter) -> None:
    """Recompute the maxima instead of keeping their indices."""
    for node in rewriter.nodes("MaxPoolGrad", MICROSOFT):
        gradient, data, indices = node.input
        kernel = attributes_of(node)["kernel_shape"]
        geometry = geometry_of(node, kernel)
        if geometry is None or prod(kernel) > MOST_PLACES or not rewriter.fits(data):
            continue
        rewriter.drop(node)
        rewriter.add("MaxPoolGrad", [rewriter.ints(*geometry), gradient, data], list(node.output))
        pooling = rewriter.maker(indices)
        if pooling is not None and not rewriter.is_read(indices):
            # Without the indices it is several times as fast.
            del pooling.output[1:]
