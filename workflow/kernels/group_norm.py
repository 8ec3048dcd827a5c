"""Group and instance normalisation and their gradient; see group_norm.c."""

from __future__ import annotations

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace the nodes that `graph.optimize.group_norm` inserted."""
    for node in rewriter.nodes("GroupNormalization", MICROSOFT):
        if rewriter.fits(node.input[0]):
            flags, y = attributes_of(node), node.output[0]
            rewriter.drop(node)
            outputs = node.output if len(node.output) == 3 else [y, f"{y}/mean", f"{y}/inverse"]
            rewriter.add("GroupNormalization", node.input, outputs, **flags)
    for node in rewriter.nodes("GroupNormalizationGrad", MICROSOFT):
        if rewriter.fits(node.input[1]):
            rewriter.drop(node)
            rewriter.add("GroupNormalizationGrad", node.input, node.output, **attributes_of(node))
