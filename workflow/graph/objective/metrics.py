"""Adds the evaluation metrics: sums over a batch that are added up over batches and ranks.

Called by `evaluation` after the loss is attached. Metrics that follow from the loss have no outputs. The list of
metrics, and the labels they compare, is in `ortflow.workflow.spec.metrics`; `ortflow.workflow.trainer.metric_values`
makes values of the totals.

Each metric has outputs `ortflow.KEY_sum` and `ortflow.KEY_weight` (fp32 scalars), or `ortflow.KEY_sums` (fp32 vector),
or, to be gathered instead of added, `ortflow.KEY_scores` (fp32 [N, columns]) and `ortflow.KEY_truths` (fp32, -1 where
a label does not count).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, scalar
from ortflow.workflow.graph.objective.compared import Comparison, comparison
from ortflow.workflow.graph.objective.labels import Labels
from ortflow.workflow.graph.objective.metric_graph import attach_graph
from ortflow.workflow.spec.metric_targets import misuse
from ortflow.workflow.spec.metrics import METRICS, MetricSection
from ortflow.workflow.spec.model import Loss

LARGEST_MATRIX = 1024
"""Classes of the largest confusion matrix: its counts are read from the graph after each batch."""
MAPE_EPS = 1.17e-6
"""Smallest label that an error is divided by, as in torchmetrics."""


def attach_metrics(
    labels: Labels, metrics: Sequence[MetricSection], loss: Loss, outputs: Mapping[str, onnx.ValueInfoProto], batch: str
) -> tuple[list[onnx.ValueInfoProto], dict[str, int]]:
    """Add the metrics' nodes; returns their outputs, and the number of classes by label.

    Raises UserError if a metric fits neither loss nor model.

    `outputs` are the model's by name.
    """
    outputs_of_metrics: dict[str, onnx.ValueInfoProto] = {}
    bounds: dict[str, int] = {}
    for place, metric in enumerate(metrics):
        key_path = f"model.metrics[{place}]"
        wrong = misuse(metric, loss)
        if wrong is not None:
            raise UserError(f"is {metric.name}, which {wrong}", where=key_path, fix="correct or remove it")
        if metric.name == "graph":
            attach_graph(labels, metric, outputs, batch, key_path)
            outputs_of_metrics |= {name: scalar(name) for name in sum_and_weight(metric.key)}
        elif metric.name in ATTACH:
            compared = comparison(labels, metric, loss, outputs, batch, key_path)
            outputs_of_metrics |= {value.name: value for value in ATTACH[metric.name](labels.edit, metric, compared)}
            if compared.classes is not None:
                bounds[compared.name] = compared.classes
    return list(outputs_of_metrics.values()), bounds


def with_outputs(metrics: Sequence[MetricSection]) -> tuple[str, ...]:
    """The metrics that have outputs of their own, by key."""
    return tuple(dict.fromkeys(metric.key for metric in metrics if METRICS[metric.name].of_loss is None))


def sum_and_weight(key: str) -> list[str]:
    """Names of a metric's two outputs."""
    return [f"ortflow.{key}_sum", f"ortflow.{key}_weight"]


def _quotient(edit: Editor, key: str, values: str, counted: str) -> list[onnx.ValueInfoProto]:
    """The sum of fp32 `values` where `counted` (bool of the same shape), and their number."""
    total, weight = sum_and_weight(key)
    edit.total(edit("Where", counted, values, edit.constant(0.0)), total)
    edit.total(edit.cast(counted), weight)
    return [scalar(total), scalar(weight)]


def _accuracy(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    """Correct labels among those that count: the largest logit's class, or the sign of each logit."""
    return _quotient(edit, metric.key, edit.cast(edit("Equal", of.decision(edit), of.truth(edit))), of.counted)


def _top_k(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    if of.classes is not None and metric.k > of.classes:
        raise UserError(f"is {metric.k}, and there are {of.classes} classes", where=f"{of.where}.k", fix="lower it")
    _, places = edit.write("TopK", [of.prediction, edit.ints(metric.k)], [edit.fresh("top"), edit.fresh("top")], axis=1)
    hits = edit.cast(edit("Equal", places, edit("Unsqueeze", of.label, edit.ints(1))))
    return _quotient(edit, metric.key, edit("ReduceMax", hits, edit.ints(1), keepdims=0), of.counted)


def _counts(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    """For each class or column: correct predictions of 1, all predictions, all labels; one after the other."""
    predicted, actual = of.indicators(edit)
    hits = edit("Mul", predicted, actual)
    sums = [edit("ReduceSum", indicator, edit.ints(0), keepdims=0) for indicator in (hits, predicted, actual)]
    if metric.average == "binary" and of.columns != 2:
        raise UserError(
            f"is binary, and there are {of.columns} classes", where=f"{of.where}.average", fix="use macro or micro"
        )
    return [_vector(edit, edit("Concat", *sums, axis=0), metric.key, 3 * of.columns)]


def _matrix(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    """Number of each label and prediction, row by row."""
    count = of.columns if of.task == "classes" else 2
    if count > LARGEST_MATRIX:
        raise UserError(
            f"is confusion_matrix, and there are {count} classes; it is computed for up to {LARGEST_MATRIX}",
            where=of.where,
            fix="remove it, or use accuracy or top_k",
        )
    if of.task == "classes":
        predicted, actual = of.indicators(edit)
    else:
        columns = of.decision(edit), of.truth(edit)
        sides = [edit("Reshape", edit.cast(edit("And", column, of.counted)), edit.ints(-1, 1)) for column in columns]
        counted = edit("Reshape", edit.cast(of.counted), edit.ints(-1, 1))
        predicted, actual = (edit("Concat", edit("Sub", counted, side), side, axis=1) for side in sides)
    matrix = edit("MatMul", edit("Transpose", actual, perm=[1, 0]), predicted)
    return [_vector(edit, edit("Reshape", matrix, edit.ints(-1)), metric.key, count * count)]


def _scores(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    scores, truths = f"ortflow.{metric.key}_scores", f"ortflow.{metric.key}_truths"
    edit("Identity", of.scores(edit), output=scores)
    counted = edit("Reshape", of.counted, edit.ints(-1, of.columns) if of.task == "targets" else edit.ints(-1))
    actual = edit.cast(of.truth(edit))
    actual = edit("Reshape", actual, edit.ints(-1, of.columns) if of.task == "targets" else edit.ints(-1))
    edit("Where", counted, actual, edit.constant(-1.0), output=truths)
    shape = ["rows", of.columns] if of.task == "targets" else ["rows"]
    return [
        helper.make_tensor_value_info(scores, TensorProto.FLOAT, ["rows", of.columns]),
        helper.make_tensor_value_info(truths, TensorProto.FLOAT, shape),
    ]


def _errors(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    error = edit("Sub", of.prediction, of.label)
    if metric.name in ("mse", "rmse"):
        return _quotient(edit, metric.key, edit("Mul", error, error), of.counted)
    size = edit("Abs", error)
    if metric.name == "mape":
        size = edit("Div", size, edit("Max", edit("Abs", of.label), edit.constant(MAPE_EPS)))
    elif metric.name != "mae":
        raise AssertionError(f"no error is defined for {metric.name}")
    return _quotient(edit, metric.key, size, of.counted)


def _r2(edit: Editor, metric: MetricSection, of: Comparison) -> list[onnx.ValueInfoProto]:
    """Number, sum and squares of the labels, and squared errors, each as a fp32 and the fp32 that it lacks of a double.

    The squares' sum minus that of the mean cancels, which would leave nothing of an fp32.
    """
    zero = edit.constant(0.0, "float64")
    x, y = (edit.cast(value, TensorProto.DOUBLE) for value in (of.prediction, of.label))
    error = edit("Sub", x, y)
    ones = edit.cast(of.counted, TensorProto.DOUBLE)
    parts = []
    for terms in (ones, y, edit("Mul", y, y), edit("Mul", error, error)):
        total = edit("ReduceSum", edit("Where", of.counted, terms, zero), keepdims=0)
        near = edit.cast(total)
        rest = edit.cast(edit("Sub", total, edit.cast(near, TensorProto.DOUBLE)))
        parts += [edit("Reshape", value, edit.ints(1)) for value in (near, rest)]
    return [_vector(edit, edit("Concat", *parts, axis=0), metric.key, len(parts))]


def _vector(edit: Editor, value: str, key: str, length: int) -> onnx.ValueInfoProto:
    edit("Identity", value, output=f"ortflow.{key}_sums")
    return helper.make_tensor_value_info(f"ortflow.{key}_sums", TensorProto.FLOAT, [length])


ATTACH: dict[str, Callable[[Editor, MetricSection, Comparison], list[onnx.ValueInfoProto]]] = {
    "top_k": _top_k,
    "precision": _counts,
    "recall": _counts,
    "f1": _counts,
    "iou": _counts,
    "confusion_matrix": _matrix,
    "auroc": _scores,
    "average_precision": _scores,
    "mae": _errors,
    "mse": _errors,
    "rmse": _errors,
    "mape": _errors,
    "r2": _r2,
    "accuracy": _accuracy,
}
"""Every metric of labels, and the function that adds its outputs."""
