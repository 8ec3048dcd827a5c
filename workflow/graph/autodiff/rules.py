"""Imports every module with rules, which registers them."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff import (  # noqa: F401 - imported for its side effect
    activations,
    attention,
    branches,
    channel_norms,
    collectives,
    convolutions,
    dropout,
    elementwise,
    indexing,
    linear,
    loops,
    norms,
    pooling,
    recurrent,
    reductions,
    selections,
    shaping,
    slicing,
    spectral,
    unary,
)
from ortflow.workflow.graph.autodiff.rule import RULES

__all__ = ["RULES"]
