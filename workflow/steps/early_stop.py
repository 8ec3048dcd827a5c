"""Early stopping. Pure except for the counters in the progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.checkpoint import Best
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.metrics import MetricSection, higher_is_better
from ortflow.workflow.spec.train import EarlyStop


def watched(rule: EarlyStop | Best, data: DataSection) -> str:
    """Identifies comparable values of the metric: the same metric on the same samples."""
    of_set = rule.metric.rpartition("/")[0]
    eval_set = data.eval_sets.get(of_set, data.eval) if of_set else data.eval
    samples = "" if data.eval_samples is None else f", first {data.eval_samples}"
    names = ", ".join(Path(path).name for path in eval_set.paths) if eval_set else ""
    return f"{rule.metric} on {names}{samples}"


def judge(
    rule: EarlyStop, progress: Progress, value: float, measure: str = "", metrics: Sequence[MetricSection] = ()
) -> bool:
    """Count an evaluation without improvement; returns True after `patience` of them in a row.

    An improvement is a change for the better by more than `min_delta`. The count restarts if `measure` differs from
    what was measured before. `value` must be finite. `metrics` are the run's.
    """
    if progress.best_of not in (None, measure):
        progress.best_metric = None
    progress.best_of = measure
    sign = -1.0 if higher_is_better(rule.metric, metrics) else 1.0
    best = progress.best_metric
    if best is None or sign * (best - value) > rule.min_delta:
        progress.best_metric, progress.best_step = value, progress.step
        progress.evaluations_without_improvement = 0
        return False
    progress.evaluations_without_improvement += 1
    return progress.evaluations_without_improvement >= rule.patience


def still_stopped(rule: EarlyStop | None, progress: Progress, measure: str = "") -> bool:
    """Whether a run that stopped early stays stopped under the rule with which it continues."""
    if rule is None or not progress.stopped_early or progress.best_of not in (None, measure):
        return False
    return progress.evaluations_without_improvement >= rule.patience
