"""BatchNormalization by batch statistics and its gradient; see batch_norm.c."""

from __future__ import annotations

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter

_EPSILON = 1e-5
_IMAGES = 3
"""Minimum rank: without spatial axes, the values of a channel are far apart in memory."""


def put(rewriter: Rewriter) -> None:
    """Replace nodes that normalise images; the running statistics are computed by separate nodes."""
    for node in rewriter.nodes("BatchNormalization"):
        attributes = attributes_of(node)
        if not attributes.get("training_mode", 0) or attributes.get("momentum", 0.9) != 0:
            continue
        if len(node.output) == 3 and all(node.output) and _are_images(rewriter, node.input[0]):
            rewriter.drop(node)
            epsilon = float(attributes.get("epsilon", _EPSILON))
            rewriter.add("BatchNormalization", node.input[:3], node.output, epsilon=epsilon)
    for node in rewriter.nodes("BatchNormalizationGrad", MICROSOFT):
        if all(node.output) and _are_images(rewriter, node.input[1]):
            rewriter.drop(node)
            rewriter.add("BatchNormalizationGrad", node.input, node.output)


def _are_images(rewriter: Rewriter, value: str) -> bool:
    return rewriter.fits(value) and len(rewriter.dims(value) or ()) >= _IMAGES
