"""The evaluation metrics: one table of the labels each compares, and of which direction is better.

Read by the run file's checks, the evaluation graph, the trainer, early stopping, sweeps and the documentation. A new
metric is an entry here and, unless it follows from the loss, nodes in `ortflow.workflow.graph.objective.metrics` and,
unless it is a quotient, its value in `ortflow.workflow.trainer.metric_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from pydantic import model_validator

from ortflow.workflow.spec.base import Positive, Section, Text

Metric = Literal[
    "accuracy",
    "perplexity",
    "top_k",
    "precision",
    "recall",
    "f1",
    "iou",
    "confusion_matrix",
    "auroc",
    "average_precision",
    "mae",
    "mse",
    "rmse",
    "mape",
    "r2",
    "graph",
]
Task = Literal["classes", "targets", "values"]
"""What labels are: numbers of classes, targets from 0 to 1, or values that are predicted."""

LARGEST_EXPONENT = 700.0
"""Above this, exp overflows a double."""


class MetricSection(Section):
    """A metric; a name alone stands for a section with that name."""

    name: Metric
    """Which metric."""
    output: Text | None = None
    """Graph output to compare; by default that of the loss."""
    label: Text | None = None
    """Label input to compare it with; by default that of the loss."""
    task: Task | None = None
    """What the labels are: classes (int64 numbers, and logits over an axis), targets (0 or 1, and a logit for each), or
    values. By default as for the loss with this label, else the first that the metric knows."""
    class_axis: int | None = None
    """Axis of the logits that runs over the classes; by default that of the loss with this label, else -1."""
    average: Literal["binary", "macro", "micro"] | None = None
    """For precision, recall, f1 and iou: the value of class 1 alone (binary), the mean over the classes (macro), or the
    value of the counts of all classes together (micro). By default macro for classes and micro for targets."""
    k: Positive = 5
    """For top_k: among how many of the largest logits the label's must be."""
    path: Text | None = None
    """For graph: an ONNX file, relative to the run file. Its inputs are outputs of the model and labels, by name; its
    outputs are the scalars `sum` and `weight`, which are added up over the evaluation set and divided."""
    better: Literal["lower", "higher"] | None = None
    """For graph: which values are better; by default lower."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @property
    def key(self) -> str:
        """The metric's name in results, which tells it from the same metric with other options."""
        if self.name == "graph":
            return PurePath(self.path or "graph").stem
        name = f"top_{self.k}" if self.name == "top_k" else self.name
        return ".".join(filter(None, (f"{name}_{self.average}" if self.average else name, self.output, self.label)))

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value is an improvement."""
        return self.better == "higher" if self.name == "graph" else METRICS[self.name].higher_is_better


@dataclass(frozen=True)
class Properties:
    """Properties of a metric."""

    meaning: str
    """One line for the documentation."""
    tasks: dict[Task, str]
    """The labels it compares, and what it counts for each."""
    higher_is_better: bool
    of_loss: Callable[[float], float] | None = None
    """The metric as a function of the mean loss over the evaluation set; the evaluation graph then has no outputs for
    it."""
    losses: frozenset[str] = frozenset()
    """With `of_loss`: the values of `model.loss.kind` of which it is a function."""
    is_number: bool = True
    """Whether the result is one number, which early stopping can compare."""


def perplexity(loss: float) -> float:
    """exp(loss); `loss` is in nats. Not finite if the loss is not."""
    return loss if not math.isfinite(loss) else math.exp(min(loss, LARGEST_EXPONENT))


_BY_CLASS: dict[Task, str] = {
    "classes": "the class of the largest logit; `average` macro, micro or binary",
    "targets": "logit > 0 as 1; `average` micro, or macro over the last axis",
}
_SCORES: dict[Task, str] = {
    "classes": "the probability of class 1 of two; of more classes the mean over each against the others",
    "targets": "the logit; the mean over the last axis",
}

METRICS: dict[Metric, Properties] = {
    "accuracy": Properties(
        meaning="share of correct predictions",
        tasks={
            "classes": "labels that equal the class of the largest logit; `ignore_index` does not count",
            "targets": "elements where logit > 0 and target > 0.5 agree",
        },
        higher_is_better=True,
    ),
    "perplexity": Properties(
        meaning="exp of the evaluation loss, which must be a cross-entropy",
        tasks={},
        higher_is_better=False,
        of_loss=perplexity,
        losses=frozenset({"cross_entropy", "output"}),
    ),
    "top_k": Properties("share of labels among the k largest logits", {"classes": "as for accuracy"}, True),
    "precision": Properties("correct predictions of a class / predictions of it", _BY_CLASS, True),
    "recall": Properties("correct predictions of a class / labels of it", _BY_CLASS, True),
    "f1": Properties("harmonic mean of precision and recall", _BY_CLASS, True),
    "iou": Properties("correct predictions of a class / predictions or labels of it", _BY_CLASS, True),
    "confusion_matrix": Properties(
        "number of each label (row) and prediction (column), in the events alone",
        {"classes": "as for accuracy", "targets": "as for accuracy"},
        True,
        is_number=False,
    ),
    "auroc": Properties("area under the receiver operating characteristic", _SCORES, True),
    "average_precision": Properties("precision, weighted by the increase of recall", _SCORES, True),
    "mae": Properties("mean absolute error", {"values": "all elements"}, False),
    "mse": Properties("mean squared error", {"values": "all elements"}, False),
    "rmse": Properties("root of the mean squared error", {"values": "all elements"}, False),
    # 1.17e-6 is the default of torchmetrics' mean_absolute_percentage_error.
    "mape": Properties("mean of the error / max(label, 1.17e-6), both absolute", {"values": "all elements"}, False),
    "r2": Properties("1 - squared errors / squared deviations of the labels", {"values": "all elements"}, True),
    "graph": Properties("your own ONNX graph, `path`", {"values": "`sum` / `weight`"}, False),
}


def higher_is_better(key: str, metrics: Iterable[MetricSection] = ()) -> bool:
    """Whether a larger value of a result is an improvement: of a metric of the run, or of the loss.

    `key` may have the name of an evaluation set before it, `NAME/KEY`. Without the run's metrics, by the name.
    """
    metric_key = key.rpartition("/")[2]
    for metric in metrics:
        if metric.key == metric_key:
            return metric.higher_is_better
    base = metric_key.partition(".")[0]
    if base.startswith("top_"):
        return True
    return any(
        base in (name, *_with_average(name)) and properties.higher_is_better for name, properties in METRICS.items()
    )


def _with_average(name: str) -> list[str]:
    return [f"{name}_{average}" for average in ("binary", "macro", "micro")]
