"""Summed cross-entropy of rows of logits with class labels, and its gradient; see cross_entropy.c."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter

_NO_LABEL = -(2**63)
"""Value of the attribute if no label is ignored."""


def put(rewriter: Rewriter) -> None:
    """Replace losses without class weights, and their gradients, if no other node reads the log-probabilities."""
    entropies = {id(node) for node in gradients(rewriter)}
    for node in losses(rewriter):
        if len(node.output) != 2:
            continue
        (scores, labels), (loss, logarithms) = node.input, node.output
        readers = rewriter.readers(logarithms)
        alike = (id(reader) in entropies and ignored(reader) == ignored(node) for reader in readers)
        if logarithms in rewriter.outputs or not all(alike):
            continue
        sums = f"{logarithms}.sums"
        rewriter.drop(node, *readers)
        rewriter.add("CrossEntropy", [labels, scores], [loss, sums], ignore=ignored(node))
        for reader in readers:
            inputs = [reader.input[2], reader.input[0], scores, sums]
            rewriter.add("CrossEntropyGrad", inputs, reader.output, ignore=ignored(node))
            rewriter.describe_like(reader.output[0], scores)


def losses(rewriter: Rewriter) -> list[onnx.NodeProto]:
    """Summed cross-entropy losses of rows without class weights: nodes (logits, labels)."""
    nodes = rewriter.nodes("SoftmaxCrossEntropyLoss")
    return [node for node in nodes if len(node.input) == 2 and _fits(rewriter, node, *node.input)]


def gradients(rewriter: Rewriter) -> list[onnx.NodeProto]:
    """Their gradients: nodes (gradient of the sum, log-probabilities, labels)."""
    nodes = rewriter.nodes("SoftmaxCrossEntropyLossGrad", MICROSOFT)
    return [node for node in nodes if len(node.input) == 3 and _fits(rewriter, node, *node.input[1:])]


def _fits(rewriter: Rewriter, node: onnx.NodeProto, scores: str, labels: str) -> bool:
    dims = rewriter.dims(scores)
    summed = attributes_of(node).get("reduction", b"mean") == b"sum"
    return summed and rewriter.is_fp32(scores) and rewriter.is_int64(labels) and dims is not None and len(dims) == 2


def ignored(node: onnx.NodeProto) -> int:
    """The label of rows that do not count."""
    return int(attributes_of(node).get("ignore_index", _NO_LABEL))
