"""The table of compositions, filled: imports the families that have some.

Ranks compose graphs, and leave the other families unimported. A test compares the table with that of all families.
"""

from __future__ import annotations

from ortflow.workflow.graph.operators import (  # noqa: F401 - imported for its side effect
    activations,
    channel_norms,
    convolutions,
    group_norm,
    indexing,
    norms,
    optimizers,
    pooling,
    softmax,
    unary,
)
from ortflow.workflow.graph.rules.composition import COMPOSITIONS

__all__ = ["COMPOSITIONS"]
