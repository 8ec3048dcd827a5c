"""The summed cross-entropy of rows of scores with classes for labels, and its gradient: see cross_entropy.c."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.edit import MICROSOFT, attributes_of
from ortflow.workflow.kernels.rewriter import Rewriter

_NO_LABEL = -(2**63)
"""No label is ignored."""


def put(rewriter: Rewriter) -> None:
    """Replace losses without class weights, and their gradients."""
    for node in rewriter.nodes("SoftmaxCrossEntropyLoss"):
        if len(node.input) == 2 and len(node.output) == 2 and _fits(rewriter, node, *node.input):
            scores, labels = node.input
            rewriter.drop(node)
            rewriter.add("CrossEntropy", [labels, scores], node.output, ignore=_ignored(node))
    for node in rewriter.nodes("SoftmaxCrossEntropyLossGrad", MICROSOFT):
        if len(node.input) == 3 and _fits(rewriter, node, *node.input[1:]):
            gradient, logarithms, labels = node.input
            rewriter.drop(node)
            rewriter.add("CrossEntropyGrad", [labels, gradient, logarithms], node.output, ignore=_ignored(node))


def _fits(rewriter: Rewriter, node: onnx.NodeProto, scores: str, labels: str) -> bool:
    dims = rewriter.dims(scores)
    summed = attributes_of(node).get("reduction", b"mean") == b"sum"
    return summed and rewriter.is_fp32(scores) and rewriter.is_int64(labels) and dims is not None and len(dims) == 2


def _ignored(node: onnx.NodeProto) -> int:
    return int(attributes_of(node).get("ignore_index", _NO_LABEL))
