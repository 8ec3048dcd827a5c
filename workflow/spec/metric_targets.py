"""What a metric of the run file compares: its own keys, completed by those of the loss with the same label. Pure.

Called by the run file's checks and by the evaluation graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.workflow.spec.losses import (
    IGNORED,
    ClassLoss,
    Ctc,
    Divergence,
    TargetLoss,
    Unlabelled,
    ValueLoss,
)
from ortflow.workflow.spec.metrics import METRICS, MetricSection, Task
from ortflow.workflow.spec.model import Loss, SingleLoss, single_losses


@dataclass(frozen=True)
class Compared:
    """What a metric compares."""

    task: Task
    output: str | None
    """None: the model's only one."""
    label: str
    class_axis: int
    ignore_index: int


_WORDS: dict[Task, str] = {"classes": "numbers of classes", "targets": "targets from 0 to 1", "values": "values"}


def compared(metric: MetricSection, loss: Loss) -> Compared | str:
    """What a metric compares; or why it cannot, as the continuation of "is NAME, which"."""
    properties = METRICS[metric.name]
    twin = _twin(metric, loss)
    task = metric.task or (_task(twin) if twin is not None else next(iter(properties.tasks)))
    label = metric.label or label_of(twin)
    if label is None:
        several = "the loss has several labels" if len(single_losses(loss)) > 1 else "the loss has no label"
        return f"compares an output with a label, and {several}: give its `output` and `label`"
    if task is None or task not in properties.tasks:
        expected = " or ".join(_WORDS[kind] for kind in properties.tasks)
        other = "is a sequence" if isinstance(twin, Ctc) else "is a distribution"
        actual = f"is of {_WORDS[task]}" if task is not None else other
        return f"compares {expected}, and label {label!r} {actual}"
    output = metric.output or (twin.output if twin is not None else None)
    ignore = twin.ignore_index if isinstance(twin, ClassLoss) else None
    axis = twin.class_axis if isinstance(twin, ClassLoss) else -1
    axis = axis if metric.class_axis is None else metric.class_axis
    return Compared(task, output, label, axis, IGNORED if ignore is None else ignore)


def misuse(metric: MetricSection, loss: Loss) -> str | None:
    """Why a metric is not computed for a loss, as the continuation of "is NAME, which"; None if it is."""
    properties = METRICS[metric.name]
    if metric.name == "graph":
        return None if metric.path is not None else "needs the key `path`"
    if metric.path is not None or metric.better is not None:
        return "has the key `path` or `better`, which are for the metric graph"
    if properties.of_loss is not None:
        kinds = " and ".join(sorted(properties.losses))
        return None if loss.kind in properties.losses else f"follows from the losses {kinds}, not from {loss.kind}"
    comparison = compared(metric, loss)
    if isinstance(comparison, str):
        return comparison
    if metric.average is not None and metric.name not in ("precision", "recall", "f1", "iou"):
        return "has no average"
    if metric.average == "binary" and comparison.task == "targets":
        return "has the average binary, which is for classes: leave it out"
    return None


def label_of(loss: SingleLoss | None) -> str | None:
    """The label of a loss; None if it has none."""
    if loss is None or isinstance(loss, Unlabelled) or (isinstance(loss, Divergence) and loss.teacher is not None):
        return None
    return loss.label


def _twin(metric: MetricSection, loss: Loss) -> SingleLoss | None:
    """The loss of the same output and label."""
    taught = [single for single in single_losses(loss).values() if isinstance(single, Divergence) and single.teacher]
    losses = [single for single in single_losses(loss).values() if single not in taught] or taught
    if metric.output is None and metric.label is None:
        return losses[0] if len(losses) == 1 else None
    for candidate in losses:
        label = label_of(candidate)
        if metric.label in (None, label) and metric.output in (None, candidate.output):
            return candidate
    return None


def _task(loss: SingleLoss) -> Task | None:
    if isinstance(loss, ClassLoss):
        return "classes"
    if isinstance(loss, TargetLoss):
        return "targets"
    if isinstance(loss, ValueLoss):
        return "values"
    assert isinstance(loss, Divergence | Ctc | Unlabelled)
    return None
