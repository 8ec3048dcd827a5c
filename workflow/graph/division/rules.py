"""Imports every family of operators with rules of a division, which registers them."""

from __future__ import annotations

from ortflow.workflow.graph.division import (  # noqa: F401 - imported for its side effect
    elementwise,
    gathered,
    normalised,
    products,
    reduced,
    shaped,
    sliced,
)
