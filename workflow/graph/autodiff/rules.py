"""Every rule: importing this module enters them all."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff import (  # noqa: F401 - what they enter is wanted
    activations,
    attention,
    channel_norms,
    collectives,
    convolutions,
    dropout,
    elementwise,
    indexing,
    linear,
    norms,
    pooling,
    recurrent,
    reductions,
    selections,
    shaping,
    slicing,
    unary,
)
from ortflow.workflow.graph.autodiff.rule import RULES

__all__ = ["RULES"]
