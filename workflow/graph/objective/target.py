"""What a loss compares, and where its sum and weight go. Plain data of `loss` and `metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The values that the loss compares, for use by the metrics."""

    prediction: str
    """Logits or prediction; for cross-entropy in `rows`, [N, classes, ...] with the classes on axis 1."""
    label: str | None
    """Labels, with ignored ones replaced by the ignore index; None if the graph computes the loss."""
    mask: str | None
    """Bool, broadcastable to the prediction: which elements count, if there may be padding; for elementwise losses."""
    classes: int | None
    """Number of classes, if known."""


@dataclass(frozen=True)
class Names:
    """The values that a loss adds."""

    total: str
    """Its sum, fp32 scalar."""
    weight: str
    """What the sum is divided by over the whole batch, fp32 scalar."""
    where: str = "model.loss"
    """Key path of the loss."""
