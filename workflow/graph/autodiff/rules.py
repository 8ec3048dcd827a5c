"""Every rule: importing this module enters them all."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff import elementwise, indexing, reductions
from ortflow.workflow.graph.autodiff.rule import RULES

FAMILIES = (elementwise, indexing, reductions)

__all__ = ["FAMILIES", "RULES"]
