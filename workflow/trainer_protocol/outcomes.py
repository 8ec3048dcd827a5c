"""Results of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step over all ranks; equal on all ranks."""

    loss: float
    grad_norm: float
    samples: int
    """Real samples over all ranks."""
    control_values: npt.NDArray[np.float32]
    """Sums of the control values over the ranks, fp32 [control values]."""
    skipped: str | None
    """Why the parameters were not updated; None if they were."""
    overflow: bool = False
    """Whether the update was skipped because the loss scale was too large for fp16. The next step has a smaller one."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Metrics over the whole evaluation set; equal on all ranks."""

    metrics: Mapping[str, float]
    """Values by name, including `loss`."""
    samples: int
    """Real samples over all ranks."""
    control_values: npt.NDArray[np.float64]
    """Sums of the control values over the ranks, fp64 [control values]."""
    not_finite: int | None = None
    """This rank's first batch, counted from 0, whose loss is NaN or infinite; None if unknown, or if there is none."""
    tables: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """Results that are not a number, by name: confusion matrices."""
