"""How operators of ONNX Runtime are written in ONNX's own, for runtimes that have no kernels for them."""

from __future__ import annotations

from collections.abc import Callable

from ortflow.workflow.graph.ir.registry import entered_in
from ortflow.workflow.graph.ir.replacement import Replacement

Composition = Callable[[Replacement], None]
"""Writes the nodes that replace a node and produce its outputs."""
COMPOSITIONS: dict[str, Composition] = {}
"""Operator of com.microsoft -> its composition."""


def composition(*operators: str) -> Callable[[Composition], Composition]:
    """Register the composition of operators. No operator has two."""
    return entered_in(COMPOSITIONS, *operators)
