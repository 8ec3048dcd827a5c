"""The gradient of a look-up of rows, as embeddings are: see table.c."""

from __future__ import annotations

from ortflow.workflow.graph.edit import MICROSOFT, attributes_of
from ortflow.workflow.kernels.rewriter import Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace the gradient of each Gather of rows of a matrix."""
    for node in rewriter.nodes("GatherGrad", MICROSOFT):
        gradient = rewriter.dims(node.output[0])
        axis = attributes_of(node).get("axis", 0)
        if axis == 0 and gradient is not None and len(gradient) == 2 and rewriter.is_int64(node.input[1]):
            rewriter.drop(node)
            rewriter.add("TableGrad", node.input, node.output)
