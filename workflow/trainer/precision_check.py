"""Compares a gradient in lower precision with the one in fp32, before the first step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.layout import Entry

APART = 0.5
"""Relative difference of two gradients that exceeds what rounding to 8 bits explains."""
SHARE = 0.05
"""Fraction of the whole gradient's norm below which tensors are not judged."""

Vector = npt.NDArray[np.float32]


def apart(exact: Vector, other: Vector, entries: Sequence[Entry]) -> tuple[float, str] | None:
    """The largest relative difference of a tensor's gradients above APART, and the tensor; None if there is none.

    `exact` and `other` are flat fp32 gradients [n]. `other` may be scaled, so directions are compared: the difference
    is the sine of the angle between them, and 1 if the angle is above 90 degrees.
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
