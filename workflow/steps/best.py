"""Which checkpoint is the best. Pure except for the numbers in the progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.checkpoint import Best
from ortflow.workflow.spec.metrics import MetricSection, higher_is_better
from ortflow.workflow.steps.not_finite import is_comparable


def improves(
    rule: Best, progress: Progress, results: Mapping[str, float], measure: str, metrics: Sequence[MetricSection]
) -> bool:
    """Whether an evaluation is better than all before, which is then noted in the progress.

    A result that is not finite, or of a set whose loss is not, is not compared. The comparison restarts if `measure`,
    the metric and its samples, differs from what was measured before. `metrics` are the run's.
    """
    value = results[rule.metric]
    if not is_comparable(results, rule.metric):
        return False
    if progress.best_checkpoint_of != measure:
        progress.best_checkpoint = progress.best_checkpoint_step = None
    sign = -1.0 if higher_is_better(rule.metric, metrics) else 1.0
    before = progress.best_checkpoint
    if before is not None and sign * value >= sign * before:
        return False
    progress.best_checkpoint, progress.best_checkpoint_step = value, progress.step
    progress.best_checkpoint_of = measure
    return True


def best_of(rule: Best | None, progress: Mapping[str, Any]) -> dict[str, Any] | None:
    """What events say of the best checkpoint: metric, value and step; None if there is none."""
    step = progress.get("best_checkpoint_step")
    if rule is None or step is None:
        return None
    return {"metric": rule.metric, "value": progress["best_checkpoint"], "step": step}


def best_path(export: Path) -> Path:
    """Where the model of the best checkpoint is exported: beside that of the last one."""
    return export.with_name(f"{export.stem}.best{export.suffix}")
