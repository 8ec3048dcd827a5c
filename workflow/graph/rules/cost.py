"""Rules for the operations of an operator that computes more than once an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import onnx

from ortflow.workflow.graph.ir.registry import entered_in


class Sizes(Protocol):
    """Sizes of the values of a graph."""

    def dims(self, value: str) -> list[int]:
        """Sizes of a value's axes; empty if its rank is unknown."""

    def elements(self, value: str) -> int:
        """Number of elements of a value."""


Rule = Callable[[onnx.NodeProto, Sizes], int]
"""Multiplications and additions of a node in the forward pass; 0 if its sizes are not known."""
COSTS: dict[str, Rule] = {}
"""Operator -> its rule."""
EXACT: set[str] = set()
"""Operators whose rule counts all of their products."""
UNCOUNTED: set[str] = set()
"""Operators whose products have no exact rule."""


def cost_rule(*operators: str, exact: bool = True) -> Callable[[Rule], Rule]:
    """Register a rule for operators. No operator has two."""
    (EXACT if exact else UNCOUNTED).update(operators)
    return entered_in(COSTS, *operators)
