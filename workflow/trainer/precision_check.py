"""How far a gradient in lower precision is from the one in fp32, before the first step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.layout import Entry

APART = 0.5
"""Difference of two gradients that is more than rounding to 8 bits explains, relative to the gradient."""
SHARE = 0.05
"""Of the whole gradient's norm: tensors with less are not judged."""

Vector = npt.NDArray[np.float32]


def apart(exact: Vector, other: Vector, entries: Sequence[Entry]) -> tuple[float, str] | None:
    """The largest relative difference of a tensor's gradients above APART, and the tensor; None if none is.

    `exact` and `other` are flat gradients fp32 [n]; `other` may be a multiple, so directions are compared: the
    difference is the sine of the angle, and 1 where the gradients point away from each other.
    """
    whole = np.linalg.norm(exact)
    found = []
    for entry in entries:
        a, b = (flat[entry.offset : entry.end].astype(np.float64) for flat in (exact, other))
        if np.linalg.norm(a) > SHARE * whole:
            found.append((_between(a, b), entry.name))
    largest = max(found, default=(0.0, ""))
    return largest if largest[0] > APART else None


def _between(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / norms if norms else 0.0
    return float(np.sqrt(max(0.0, 1 - cosine**2))) if cosine > 0 else 1.0
