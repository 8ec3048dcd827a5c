"""Gelu, exact or approximated by tanh, and its gradient; see gelu.c."""

from __future__ import annotations

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.rewriter import Rewriter

_OPERATORS = {
    "Gelu": ("Gelu", 0),
    "FastGelu": ("Gelu", 1),
    "GeluGrad": ("GeluGrad", 0),
    "FastGeluGrad": ("GeluGrad", 1),
}


def put(rewriter: Rewriter) -> None:
    """Replace ONNX Runtime's Gelu nodes; those with a bias stay."""
    for operator, (kernel, approximate) in _OPERATORS.items():
        for node in rewriter.nodes(operator, MICROSOFT):
            count = 2 if kernel == "GeluGrad" else 1
            if len(node.input) == count and rewriter.fits(node.input[-1]):
                rewriter.drop(node)
                rewriter.add(kernel, node.input, node.output, approximate=approximate)
