"""The gradient rules of all operators. Those of operators with subgraphs differentiate graphs, and stand here."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff import branches, loops  # noqa: F401 - imported for its side effect
from ortflow.workflow.graph.operators.families import GRADIENTS as RULES

__all__ = ["RULES"]
