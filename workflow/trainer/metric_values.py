"""From the totals of an evaluation to the values of its metrics. Pure.

Called by `evaluation`. `ortflow.workflow.graph.objective.metrics` says what the totals are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_never

from ortflow.workflow.spec.metrics import MetricSection, Task

Array = npt.NDArray[np.float64]
Scores = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Scores [rows, columns], and truths [rows, columns] or the classes [rows]; -1 where a label does not count."""


def quotient(total: float, weight: float) -> float:
    """`total` over `weight`; NaN if the weight is 0."""
    return total / weight if weight else math.nan


def value_of(
    metric: MetricSection, task: Task | None, totals: Mapping[str, Array], gathered: Mapping[str, Scores]
) -> float:
    """The value of a metric that does not follow from the loss; `task` says what its labels are."""
    if metric.name in ("auroc", "average_precision"):
        of_column = area if metric.name == "auroc" else average_precision
        return mean_over_columns(*gathered[metric.key], of_column)
    if metric.name == "r2":
        return r2(totals[f"ortflow.{metric.key}_sums"])
    if metric.name in COUNTED:
        return of_counts(metric, task, totals[f"ortflow.{metric.key}_sums"].reshape(3, -1))
    value = quotient(float(totals[f"ortflow.{metric.key}_sum"][0]), float(totals[f"ortflow.{metric.key}_weight"][0]))
    return math.sqrt(value) if metric.name == "rmse" and value >= 0 else value


def matrix_of(sums: Array) -> list[list[int]]:
    """The confusion matrix: rows are labels, columns predictions."""
    size = math.isqrt(len(sums))
    return [[round(count) for count in row] for row in sums.reshape(size, size).tolist()]


def _share(part: Array, total: Array) -> Array:
    """0 where both are 0, as scikit-learn's default."""
    return np.divide(part, total, out=np.zeros_like(part), where=total > 0)


COUNTED: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "precision": lambda correct, predicted, actual: _share(correct, predicted),
    "recall": lambda correct, predicted, actual: _share(correct, actual),
    "f1": lambda correct, predicted, actual: _share(2 * correct, predicted + actual),
    "iou": lambda correct, predicted, actual: _share(correct, predicted + actual - correct),
}
"""Metric -> function of the correct predictions, all predictions and all labels of each class."""


def of_counts(metric: MetricSection, task: Task | None, counts: Array) -> float:
    """Precision, recall, F1 or IoU of counts [3, classes or columns]; NaN if there are no labels.

    The mean over the classes leaves out those that are neither labels nor predictions, as scikit-learn does.
    """
    if not counts.any():
        return math.nan
    average = metric.average or ("micro" if task == "targets" else "macro")
    if average == "micro":
        counts = counts.sum(axis=1, keepdims=True)
    elif average == "binary":
        counts = counts[:, 1:]
    elif average == "macro":
        # With targets, each column counts; a class that is neither a label nor a prediction has no value.
        counts = counts if task == "targets" else counts[:, counts[1:].sum(axis=0) > 0]
    else:
        assert_never(average)
    return float(COUNTED[metric.name](*counts).mean())


def r2(sums: Array) -> float:
    """1 - squared errors / squared deviations, from number, sum, squares and squared errors, each in two parts.

    NaN if all labels are equal.
    """
    count, total, squares, errors = (float(sums[place] + sums[place + 1]) for place in (0, 2, 4, 6))
    if not count:
        return math.nan
    deviations = squares - total * total / count
    return 1 - errors / deviations if deviations > 0 else math.nan


def mean_over_columns(
    scores: npt.NDArray[np.float32],
    truths: npt.NDArray[np.float32],
    of_column: Callable[[npt.NDArray[np.float32], npt.NDArray[np.bool_]], float],
) -> float:
    """The mean over columns that have labels of both kinds; NaN if none has."""
    if truths.ndim == 1 and scores.shape[1] == 2:
        columns = [(scores[:, 1] - scores[:, 0], truths)]
    elif truths.ndim == 1:
        class_truths = np.where(truths[:, None] < 0, -1, truths[:, None] == np.arange(scores.shape[1]))
        columns = [(scores[:, place], class_truths[:, place]) for place in range(scores.shape[1])]
    else:
        columns = [(scores[:, place], truths[:, place]) for place in range(scores.shape[1])]
    values = [of_column(score[truth >= 0], truth[truth >= 0] > 0) for score, truth in columns]
    defined_values = [value for value in values if not math.isnan(value)]
    return sum(defined_values) / len(defined_values) if defined_values else math.nan


def _steps(scores: npt.NDArray[np.float32], truths: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """True and false positives at each distinct threshold, from the highest. NaN scores make the result NaN."""
    order = np.argsort(-scores, kind="stable")
    ordered, hits = scores[order], truths[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    true = np.cumsum(hits, dtype=np.float64)[ends]
    return true, 1.0 + ends - true


def area(scores: npt.NDArray[np.float32], truths: npt.NDArray[np.bool_]) -> float:
    """Area under the receiver operating characteristic: the share of pairs of a positive and a negative in order.

    Equal scores count half. NaN if one kind is missing, or a score is NaN.
    """
    if np.isnan(scores).any() or not truths.any() or truths.all():
        return math.nan
    true, false = _steps(scores, truths)
    true, false = np.append(0.0, true), np.append(0.0, false)
    return float(((true[1:] + true[:-1]) / 2 * np.diff(false)).sum() / (true[-1] * false[-1]))


def average_precision(scores: npt.NDArray[np.float32], truths: npt.NDArray[np.bool_]) -> float:
    """The sum over the thresholds of the increase of recall times precision, as scikit-learn's.

    NaN if there is no positive label, or a score is NaN.
    """
    if np.isnan(scores).any() or not truths.any():
        return math.nan
    true, false = _steps(scores, truths)
    return float((np.diff(np.append(0.0, true)) * true / (true + false)).sum() / true[-1])
