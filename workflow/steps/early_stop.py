"""Whether a run has stopped learning. Pure but for the counters it keeps in the progress."""

from __future__ import annotations

import math

from ortflow.workflow.progress import Progress
from ortflow.workflow.spec.metrics import higher_is_better
from ortflow.workflow.spec.train import EarlyStop


def judge(rule: EarlyStop, progress: Progress, value: float) -> bool:
    """Count an evaluation without improvement; True when there were `patience` of them in a row.

    An improvement is a change for the better by more than `min_delta`; a NaN is none.
    """
    sign = -1.0 if higher_is_better(rule.metric) else 1.0
    best = progress.best_metric
    if not math.isnan(value) and (best is None or sign * (best - value) > rule.min_delta):
        progress.best_metric = value
        progress.evaluations_without_improvement = 0
        return False
    progress.evaluations_without_improvement += 1
    return progress.evaluations_without_improvement >= rule.patience
