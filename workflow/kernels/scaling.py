"""The flat gradients scaled and clipped and their norm, in one pass over the memory: see scaling.c."""

from __future__ import annotations

from ortflow.workflow.graph.ir.rewriter import Rewriter

_OUTPUTS = ["gradients.out", "norm"]


def put(rewriter: Rewriter) -> None:
    """Replace all of the graph that `optim.gradient` makes; no other graph has its outputs."""
    if rewriter.outputs == _OUTPUTS:
        rewriter.drop(*rewriter.all_nodes())
        rewriter.add("ScaleGradients", ["gradients", "inverse_weight", "max_norm"], _OUTPUTS)
