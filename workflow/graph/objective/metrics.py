"""Adds the evaluation metrics, each as a sum and a weight like the loss.

Called by `evaluation` after the loss is attached. Metrics that follow from the loss have no outputs. The list of
metrics, and their losses, is in `ortflow.workflow.spec.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.target import Target
from ortflow.workflow.graph.types import LOSS_WEIGHT
from ortflow.workflow.spec.losses import BinaryCrossEntropy, CrossEntropy
from ortflow.workflow.spec.metrics import Metric, misuse
from ortflow.workflow.spec.model import Loss


def attach_metrics(edit: Editor, metrics: Sequence[Metric], loss: Loss, target: Target) -> list[str]:
    """Add the metrics' nodes; returns the names of their outputs. Raises UserError if loss and metric do not match."""
    outputs = []
    for metric in dict.fromkeys(metrics):
        wrong = misuse(metric, loss.kind)
        if wrong is not None:
            raise UserError(f"names {wrong}", where="model.metrics", fix="remove it")
        if metric in ATTACH:
            ATTACH[metric](edit, loss, target)
            outputs += sum_and_weight(metric)
    return outputs


def with_outputs(metrics: Sequence[Metric]) -> tuple[str, ...]:
    """The metrics that have outputs of their own."""
    return tuple(metric for metric in dict.fromkeys(metrics) if metric in ATTACH)


def sum_and_weight(metric: str) -> list[str]:
    """Names of a metric's two outputs."""
    return [f"ortflow.{metric}_sum", f"ortflow.{metric}_weight"]


def _accuracy(edit: Editor, loss: Loss, target: Target) -> None:
    """Number of correct labels among those that count: the largest logit's class, or the sign of each logit."""
    assert target.label is not None
    total, weight = sum_and_weight("accuracy")
    if isinstance(loss, CrossEntropy):
        best = edit("ArgMax", target.prediction, axis=1, keepdims=0)
        # An ignored label may be a valid class number; it must not count as correct.
        counted = edit("Not", edit("Equal", target.label, edit.constant(loss.ignore_index, "int64")))
        right = edit("And", edit("Equal", best, target.label), counted)
    elif isinstance(loss, BinaryCrossEntropy):
        positive = edit("Greater", target.prediction, edit.constant(0.0))
        right = edit("Equal", positive, edit("Greater", target.label, edit.constant(0.5)))
        if target.mask is not None:
            right = edit("And", right, target.mask)
    else:
        raise TypeError(f"the accuracy of {loss.kind} is not defined")
    edit.total(edit.cast(right, TensorProto.FLOAT), total)
    edit("Identity", LOSS_WEIGHT, output=weight)


ATTACH: dict[Metric, Callable[[Editor, Loss, Target], None]] = {"accuracy": _accuracy}
"""Every metric that does not follow from the loss, and the function that adds its two outputs."""
