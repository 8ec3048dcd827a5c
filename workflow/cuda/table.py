"""Imports every family of operators, which registers them. A new module is added here."""

from __future__ import annotations

from ortflow.workflow.cuda import (  # noqa: F401 - imported for its side effect
    attention,
    batch_norm,
    bucket,
    channels,
    collective,
    convolution,
    cross_entropy,
    embedding,
    join,
    norm,
    pooling,
    product,
    rotary,
    scalars,
    shards,
    softmax,
    squares,
    sums,
    table_rows,
)
from ortflow.workflow.cuda.registry import HALF, HALF_ONLY, OPERATORS

__all__ = ["HALF", "HALF_ONLY", "OPERATORS"]
