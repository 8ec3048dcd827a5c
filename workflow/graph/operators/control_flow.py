"""Operators with subgraphs. Their gradients differentiate whole graphs: `autodiff.branches` and `autodiff.loops`."""

from __future__ import annotations

from ortflow.workflow.graph.rules.cost import UNCOUNTED
from ortflow.workflow.graph.rules.traits import Trait, describe

UNCOUNTED.update(["Loop", "Scan"])
describe(["If", "Loop", "Scan"], Trait.HEAVY)
