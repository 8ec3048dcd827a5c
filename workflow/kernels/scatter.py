"""GatherElements, and ScatterElements that adds, with indices that are broadcast; see scatter.c."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace both where all their types are supported."""
    # ONNX Runtime's kernels compute the place of every element, and exporters write a row's index out once for each of
    # its elements: graph attention took 1.5 times PyTorch's processor time.
    for node in rewriter.nodes("GatherElements"):
        data, indices = node.input
        if _fits(rewriter, data, indices):
            rewriter.drop(node)
            expand = _expand(rewriter, indices)
            inputs = [*expand.input[::-1]] if expand is not None else [rewriter.ints(1), indices]
            rewriter.add("GatherElements", [*inputs, data], list(node.output), axis=_axis(rewriter, node))
    for node in rewriter.nodes("ScatterElements"):
        data, indices, updates = node.input
        adds = attributes_of(node).get("reduction") == b"add"
        if adds and rewriter.is_fp32(updates) and _fits(rewriter, data, indices):
            rewriter.drop(node)
            expand = _expand(rewriter, indices)
            inputs = [indices if expand is None else expand.input[0], updates, data]
            rewriter.add("ScatterAdd", inputs, list(node.output), axis=_axis(rewriter, node))


def _fits(rewriter: Rewriter, data: str, indices: str) -> bool:
    return rewriter.fits(data) and rewriter.is_int64(indices)


def _axis(rewriter: Rewriter, node: onnx.NodeProto) -> int:
    dims = rewriter.dims(node.input[0]) or ()
    return int(attributes_of(node).get("axis", 0)) % len(dims)


def _expand(rewriter: Rewriter, indices: str) -> onnx.NodeProto | None:
    """The node that broadcasts indices to the elements, if it keeps their number of axes."""
    expand = rewriter.made_by(indices, "Expand")
    if expand is None:
        return None
    before, behind = rewriter.dims(expand.input[0]), rewriter.dims(indices)
    return expand if before is not None and behind is not None and len(before) == len(behind) else None
