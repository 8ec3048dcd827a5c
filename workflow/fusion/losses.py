"""Joins the cross-entropy and its gradient to one node, which passes over the scores once. Pure.

Only where one graph computes both: the gradient of the loss must be known before the loss is. Called by step
`configure` for the training graphs of undivided models on GPUs.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter


def join_losses(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with CrossEntropyWithGrad for each CrossEntropy whose logarithms only its gradient reads."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = Rewriter(copy.graph, CUDA_DOMAIN)
    for loss in rewriter.nodes("CrossEntropy", CUDA_DOMAIN):
        (labels, scores), (out, logarithms), attributes = loss.input, loss.output, attributes_of(loss)
        gradient = rewriter.only_reader(logarithms)
        if gradient is None or gradient.op_type != "CrossEntropyGrad" or gradient.domain != CUDA_DOMAIN:
            continue
        its_labels, of_loss, its_scores, _ = gradient.input
        operands_agree = (its_labels, its_scores, attributes_of(gradient)) == (labels, scores, attributes)
        # If the loss's gradient is computed from the loss, the one node would wait for itself.
        if operands_agree and id(loss) not in rewriter.needed_by([of_loss]):
            rewriter.drop(loss, gradient)
            outputs = [out, gradient.output[0]]
            rewriter.add("CrossEntropyWithGrad", [labels, of_loss, scores], outputs, **attributes)
    rewriter.finish()
    return copy
