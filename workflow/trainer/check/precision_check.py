"""Compares a gradient in lower precision with the one in fp32, before the first step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ortflow.workflow.errors import UserError
from ortflow.workflow.trainer.check.checked_part import CheckedPart

APART = 0.5
"""Relative difference of two gradients that exceeds what rounding to 8 bits explains."""
SHARE = 0.05
"""Fraction of the whole gradient's norm below which tensors are not judged."""

_NAMED = 5
COMPARED_SCALES = (65536.0, 1024.0, 16.0, 1.0)
"""Loss scales with which gradients in fp16 are compared: the first without an overflow."""

Vector = npt.NDArray[np.float32]


def compare(
    exact: Vector,
    gradient: Callable[[float], Vector],
    finite: Callable[[Vector], bool],
    part: CheckedPart,
    precision: str,
    scales: bool,
) -> str:
    """What to warn of if a gradient in lower precision is far from the one in fp32; empty if it is not.

    Parameters
    ----------
    exact
        The flat gradient of the part in fp32.
    gradient
        That of training, at a loss scale.
    finite
        Whether such a gradient is finite on all ranks.
    part
        What this rank holds.
    precision
        That of training.
    scales
        Whether the loss is scaled. Only the direction counts: any scale without an overflow will do.

    Raises
    ------
    UserError
        If the gradient in lower precision is finite at no scale: every step would be skipped.
    """
    for scale in COMPARED_SCALES if scales else COMPARED_SCALES[-1:]:
        training_gradient = gradient(scale)
        if finite(training_gradient):
            break
    else:
        raise _not_finite(training_gradient, part, precision)
    worst = apart(exact, training_gradient, part)
    if worst is None:
        return ""
    difference, name = worst
    return (
        f"the gradient of {name!r} in {precision} differs from the one in fp32 by {difference:.0%}; use "
        "train.precision: fp32, and report the model to ortflow"
    )


def _not_finite(gradient: Vector, part: CheckedPart, precision: str) -> UserError:
    counts = part.totals(np.array([float((~np.isfinite(gradient[t.start : t.stop])).sum()) for t in part.tensors]))
    names = [tensor.name for tensor, count in zip(part.tensors, counts.tolist(), strict=True) if count]
    quoted_names = ", ".join(map(repr, names[:_NAMED])) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
    return UserError(
        f"the gradient of {quoted_names} is not finite in {precision}, and it is in fp32",
        where="train.precision",
        fix="use train.precision: fp32, and report the model to ortflow; train.check_gradient: false trains it anyway",
    )


def apart(exact: Vector, other: Vector, part: CheckedPart) -> tuple[float, str] | None:
    """The largest relative difference of a tensor's gradients above APART, and the tensor; None if there is none.

    `exact` and `other` are flat fp32 gradients of the part. `other` may be scaled, so directions are compared: the
    difference is the sine of the angle between them, and 1 if the angle is above 90 degrees.
    """
    products = []
    for tensor in part.tensors:
        a, b = (flat[tensor.start : tensor.stop].astype(np.float64) for flat in (exact, other))
        products += [a @ a, b @ b, a @ b]
    sums = part.totals(np.array(products)).reshape(-1, 3)
    squared_norm = sums[:, 0].sum()
    differences = [
        (_between(*row), tensor.name)
        for tensor, row in zip(part.tensors, sums.tolist(), strict=True)
        if row[0] > SHARE**2 * squared_norm
    ]
    largest = max(differences, default=(0.0, ""))
    return largest if largest[0] > APART else None


def _between(first: float, second: float, product: float) -> float:
    """From the squares of two vectors and their product."""
    norms = (first * second) ** 0.5
    cosine = product / norms if norms else 0.0
    return float(max(0.0, 1 - cosine**2) ** 0.5) if cosine > 0 else 1.0
