"""Losses that compare outputs of the model with each other, without a label. Called by `loss`.

docs/losses.md has the sources.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.batch_axis import checked_dims
from ortflow.workflow.graph.objective.labels import Labels, size, text
from ortflow.workflow.graph.objective.target import Names
from ortflow.workflow.spec.losses import InfoNce, Triplet

NORM_EPS = 1e-12
"""Smallest length that a vector is divided by, as in torch.nn.functional.normalize."""
DISTANCE_EPS = 1e-6
"""Added to each difference, as in torch.nn.TripletMarginLoss: the distance of equal vectors has a gradient."""
FAR = -1e9
"""A similarity whose exponential is 0."""


def info_nce(
    edit: Editor, labels: Labels, loss: InfoNce, output: onnx.ValueInfoProto, batch: str, names: Names
) -> None:
    """Add the mean of both cross-entropies of the similarities [batch, batch], whose labels are the diagonal."""
    sides = _vectors(edit, [output, _output(edit, loss.other)], batch, names)
    first, second = (_normalised(edit, value) for value in sides)
    similar = edit("MatMul", first, edit("Transpose", second, perm=[1, 0]))
    similar = edit("Mul", similar, edit.constant(1 / loss.temperature))
    rows = edit("Range", edit.constant(0, "int64"), size(edit, similar, 0), edit.constant(1, "int64"))
    losses = []
    for scores in (similar, edit("Transpose", similar, perm=[1, 0])):
        if labels.padded:
            valid = edit("Transpose", labels.valid_rows(scores, 2), perm=[1, 0])
            scores = edit("Where", valid, scores, edit.constant(FAR))
        outputs = [edit.fresh("loss"), edit.fresh("log_probability")]
        losses.append(edit.write("SoftmaxCrossEntropyLoss", [scores, rows], outputs, reduction="none")[0])
    _finish(edit, labels, edit("Mul", edit("Add", *losses), edit.constant(0.5)), names)


def triplet(edit: Editor, labels: Labels, loss: Triplet, output: onnx.ValueInfoProto, batch: str, names: Names) -> None:
    """Add max(0, |a - p| - |a - n| + margin)."""
    pair = [_output(edit, loss.positive), _output(edit, loss.negative)]
    anchor, positive, negative = _vectors(edit, [output, *pair], batch, names)

    def distance(other: str) -> str:
        difference = edit("Add", edit("Sub", anchor, other), edit.constant(DISTANCE_EPS))
        return edit("ReduceL2", difference, edit.ints(1), keepdims=0)

    apart = edit("Add", edit("Sub", distance(positive), distance(negative)), edit.constant(loss.margin))
    _finish(edit, labels, edit("Relu", apart), names)


def _output(edit: Editor, name: str) -> onnx.ValueInfoProto:
    return next(value for value in edit.graph.output if value.name == name)


def _vectors(edit: Editor, outputs: list[onnx.ValueInfoProto], batch: str, names: Names) -> list[str]:
    """The names of outputs [batch, length], all of one length."""
    shapes = [checked_dims(edit.graph, output, batch, names.where) for output in outputs]
    for output, shape in zip(outputs, shapes, strict=True):
        if len(shape) != 2 or shape[1] != shapes[0][1]:
            raise UserError(
                f"compares vectors, and output {output.name!r} has the shape {text(shape)}",
                where=names.where,
                fix="name outputs of the shape [batch, length], all of the same length",
            )
    return [str(output.name) for output in outputs]


def _normalised(edit: Editor, value: str) -> str:
    length = edit("ReduceL2", value, edit.ints(1), keepdims=1)
    return edit("Div", value, edit("Max", length, edit.constant(NORM_EPS)))


def _finish(edit: Editor, labels: Labels, losses: str, names: Names) -> None:
    """Add the sum of a loss of each sample, fp32 [batch], and the number of samples."""
    if labels.padded:
        losses = edit("Where", labels.valid_rows(losses, 1), losses, edit.constant(0.0))
    edit.total(losses, names.total)
    labels.count(losses, names.weight)
