"""From the sums of an evaluation graph over all ranks to the values of the metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.spec.metrics import METRICS, Metric
from ortflow.workflow.trainer import EvaluationOutcome


def evaluated(
    totals: npt.NDArray[np.float64],
    names: Sequence[str],
    metrics: Sequence[Metric],
    control_values: int,
    not_finite: int | None = None,
) -> EvaluationOutcome:
    """The outcome of an evaluation.

    Parameters
    ----------
    totals
        Sums over all ranks, fp64: the graph's outputs, the samples, the control values, then anything.
    names
        The graph's outputs, `ortflow.NAME_sum` and `ortflow.NAME_weight`.
    metrics
        `model.metrics`.
    control_values
        Their number.
    not_finite
        See `EvaluationOutcome`.
    """
    values, end = ratios(dict(zip(names, totals.tolist(), strict=False))), len(names) + 1
    for name in metrics:
        of_loss = METRICS[name].of_loss
        if of_loss is not None:
            values[name] = of_loss(values["loss"])
    return EvaluationOutcome(values, round(totals[len(names)]), totals[end : end + control_values], not_finite)


def ratios(sums: Mapping[str, float]) -> dict[str, float]:
    """`ortflow.NAME_sum` over `ortflow.NAME_weight`, by name; NaN if the weight is 0."""
    metrics = {}
    for name in sums:
        if name.endswith("_sum"):
            weight = sums[name.removesuffix("_sum") + "_weight"]
            metric = name.removeprefix("ortflow.").removesuffix("_sum")
            metrics[metric] = sums[name] / weight if weight else math.nan
    return metrics
