"""The gradient of a look-up of rows, as in embeddings; see table.c."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace the gradient of each Gather of rows of a matrix."""
    for node in look_ups(rewriter):
        rewriter.drop(node)
        rewriter.add("TableGrad", node.input, node.output)


def look_ups(rewriter: Rewriter) -> list[onnx.NodeProto]:
    """Gradients of Gather of matrix rows with int64 indices: nodes (shape, indices, gradient)."""
    return [node for node in rewriter.nodes("GatherGrad", MICROSOFT) if _fits(rewriter, node)]


def _fits(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    dims = rewriter.dims(node.output[0])
    rows = attributes_of(node).get("axis", 0) == 0 and dims is not None and len(dims) == 2
    return rows and rewriter.is_int64(node.input[1])
