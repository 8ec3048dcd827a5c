"""The tables of `rules`, filled: imports every family of operators. A new family is added here.

Passes take the tables from here, so that none is read before it is full.
"""

from __future__ import annotations

from ortflow.workflow.graph.operators import (  # noqa: F401 - imported for its side effect
    activations,
    attention,
    channel_norms,
    collectives,
    control_flow,
    convolutions,
    dropout,
    elementwise,
    fused,
    group_norm,
    indexing,
    joins,
    linear,
    norms,
    optimizers,
    pooling,
    rearrangements,
    recurrent,
    reductions,
    selections,
    shaping,
    slicing,
    softmax,
    spectral,
    unary,
)
from ortflow.workflow.graph.rules.cost import COSTS, EXACT, UNCOUNTED
from ortflow.workflow.graph.rules.gradient import RULES as GRADIENTS
from ortflow.workflow.graph.rules.precision import HALF_PRODUCTS
from ortflow.workflow.graph.rules.size import SIZES
from ortflow.workflow.graph.rules.spread import RULES as DIVISIONS
from ortflow.workflow.graph.rules.traits import POSSIBLE_WEIGHTS, WEIGHTS, Trait, having

__all__ = [
    "COSTS",
    "DIVISIONS",
    "EXACT",
    "GRADIENTS",
    "HALF_PRODUCTS",
    "POSSIBLE_WEIGHTS",
    "SIZES",
    "UNCOUNTED",
    "WEIGHTS",
    "Trait",
    "having",
]
