"""What a metric compares, as values of the evaluation graph. Called by `metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.batch_axis import checked_dims
from ortflow.workflow.graph.objective.by_class import rows_of
from ortflow.workflow.graph.objective.labels import Labels, text
from ortflow.workflow.graph.objective.logits import read_logits
from ortflow.workflow.graph.objective.metric_graph import graph_inputs
from ortflow.workflow.spec.losses import BinaryCrossEntropy, CrossEntropy
from ortflow.workflow.spec.metric_targets import Compared, compared
from ortflow.workflow.spec.metrics import METRICS, MetricSection, Task
from ortflow.workflow.spec.model import Loss


@dataclass(frozen=True)
class Comparison:
    """A prediction and its labels."""

    task: Task
    prediction: str
    """For classes logits [N, classes, ...], else the label's shape."""
    label: str
    """int64 [N, ...] for classes, else fp32."""
    counted: str
    """Bool of the label's shape: which labels count."""
    rank: int
    """Axes of the prediction."""
    classes: int | None
    """Number of classes, if known."""
    last: int
    """Length of the last axis of targets; 1 if there is none, or if it is not known."""
    name: str
    """Of the label input."""
    where: str

    @property
    def columns(self) -> int:
        """Number of classes, or of targets of a sample. Raises UserError if the number of classes is unknown."""
        if self.task != "classes":
            return self.last
        if self.classes is None:
            raise UserError(
                "needs the number of classes, and the output's axis of the classes has no fixed length",
                where=self.where,
                fix="export the model with the number of classes as a number",
            )
        return self.classes

    def decision(self, edit: Editor) -> str:
        """The predicted class, or whether a logit is above 0."""
        if self.task == "classes":
            return edit("ArgMax", self.prediction, axis=1, keepdims=0)
        return edit("Greater", self.prediction, edit.constant(0.0))

    def truth(self, edit: Editor) -> str:
        """The label as `decision` has it."""
        return self.label if self.task == "classes" else edit("Greater", self.label, edit.constant(0.5))

    def indicators(self, edit: Editor) -> tuple[str, str]:
        """Prediction and label as fp32 0 and 1, [rows, columns]; 0 where a label does not count."""
        columns = self.columns
        if self.task == "targets":
            columns_of = (
                edit.cast(edit("And", mask, self.counted)) for mask in (self.decision(edit), self.truth(edit))
            )
            predicted, actual = (edit("Reshape", indicator, edit.ints(-1, columns)) for indicator in columns_of)
            return predicted, actual
        flat = [edit("Reshape", value, edit.ints(-1)) for value in (self.decision(edit), self.label, self.counted)]
        classes = edit.constant([[*range(columns)]], "int64")
        counted = edit("Unsqueeze", flat[2], edit.ints(1))
        sides = (edit("Equal", edit("Unsqueeze", side, edit.ints(1)), classes) for side in flat[:2])
        predicted, actual = (edit.cast(edit("And", side, counted)) for side in sides)
        return predicted, actual

    def scores(self, edit: Editor) -> str:
        """What orders the samples, fp32 [rows, columns]: logits, or the logarithms of the classes' probabilities."""
        if self.task == "targets":
            return edit("Reshape", self.prediction, edit.ints(-1, self.columns))
        logs = edit("LogSoftmax", self.prediction, axis=1)
        if self.rank > 2:
            logs = edit("Transpose", logs, perm=[0, *range(2, self.rank), 1])
        return edit("Reshape", logs, edit.ints(-1, self.columns))


def comparison(
    labels: Labels,
    metric: MetricSection,
    loss: Loss,
    outputs: Mapping[str, onnx.ValueInfoProto],
    batch: str,
    location: str,
) -> Comparison:
    """Add what a metric compares. Raises UserError if the model has no such output or label."""
    subject = compared(metric, loss)
    assert isinstance(subject, Compared)
    output = output_named(outputs, subject.output, location)
    edit, dims = labels.edit, checked_dims(labels.edit.graph, output, batch, location)
    if subject.task == "classes":
        stand_in = CrossEntropy(
            kind="cross_entropy",
            output=output.name,
            label=subject.label,
            class_axis=subject.class_axis,
            ignore_index=subject.ignore_index,
        )
        rows = rows_of(edit, labels, stand_in, output.name, read_logits(edit, stand_in, output.name), dims, location)
        return Comparison(
            "classes", rows.logits, rows.label, rows.counted, rows.rank, rows.classes, 1, subject.label, location
        )
    value = str(output.name)
    if subject.task == "targets":
        value = read_logits(edit, BinaryCrossEntropy(kind="bce_with_logits"), value)
    label = labels.input(subject.label, TensorProto.FLOAT, dims, f"{location}.label")
    last = dims[-1] if len(dims) > 1 else 1
    if subject.task == "targets" and not isinstance(last, int):
        raise UserError(
            f"compares output {output.name!r} of shape {text(dims)}, whose last axis has no fixed length",
            where=location,
            fix="export the model with its length as a number",
        )
    valid = labels.valid_rows(value, len(dims)) if labels.padded else edit.constant(True, "bool")
    counted = edit("Expand", valid, edit("Shape", value))
    last = last if isinstance(last, int) else 1
    return Comparison(subject.task, value, label, counted, len(dims), None, last, subject.label, location)


def metric_outputs(
    metrics: Sequence[MetricSection], loss: Loss, outputs: Mapping[str, onnx.ValueInfoProto]
) -> list[str]:
    """The model's outputs that metrics compare. `outputs` are all by name. Raises UserError if there is no such one."""
    names = []
    for place, metric in enumerate(metrics):
        if metric.name == "graph":
            names += [name for name in graph_inputs(metric, f"model.metrics[{place}]") if name in outputs]
        elif METRICS[metric.name].of_loss is None and isinstance(subject := compared(metric, loss), Compared):
            names.append(str(output_named(outputs, subject.output, f"model.metrics[{place}]").name))
    return list(dict.fromkeys(names))


def output_named(outputs: Mapping[str, onnx.ValueInfoProto], name: str | None, location: str) -> onnx.ValueInfoProto:
    """An output of the model, or its only one. Raises UserError if there is none of the name, or no only one."""
    if name is None and len(outputs) == 1:
        return next(iter(outputs.values()))
    if name is None:
        several = f"the model has {len(outputs)} outputs ({', '.join(outputs)})"
        raise UserError(several, where=location, fix="set `output` to the one for the metric")
    if name not in outputs:
        raise UserError(
            f"the model has no output {name!r}", where=f"{location}.output", fix=f"it has {', '.join(outputs)}"
        )
    return outputs[name]
