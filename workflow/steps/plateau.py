"""The schedule reduce_on_plateau: counts evaluations without improvement. Pure except for the counters in the progress.

The counters are part of every checkpoint, so that a resumed run decays its rate after the same evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.metrics import MetricSection, higher_is_better
from ortflow.workflow.spec.schedules import Schedule


def judge_plateau(
    schedule: Schedule, progress: Progress, value: float, measure: str = "", metrics: Sequence[MetricSection] = ()
) -> bool:
    """Count an evaluation; returns True if the learning rate is decayed after it.

    The rule is torch.optim.lr_scheduler.ReduceLROnPlateau's with `threshold_mode="abs"`. The count restarts if
    `measure` differs from what was measured before. `value` must be finite. `metrics` are the run's.
    """
    if progress.plateau_of not in (None, measure):
        progress.plateau_best, progress.plateau_evaluations = None, 0
    progress.plateau_of = measure
    sign, best = -1.0 if higher_is_better(schedule.metric, metrics) else 1.0, progress.plateau_best
    if best is None or sign * (best - value) > schedule.min_delta:
        progress.plateau_best, progress.plateau_evaluations = value, 0
    else:
        progress.plateau_evaluations += 1
    if progress.plateau_cooldown:
        progress.plateau_cooldown -= 1
        progress.plateau_evaluations = 0
    if progress.plateau_evaluations <= schedule.patience:
        return False
    progress.plateau_reductions += 1
    progress.plateau_cooldown, progress.plateau_evaluations = schedule.cooldown, 0
    return True
