"""Losses of logits over classes: against labels that are numbers of classes, or against probabilities.

Called by `loss`. docs/losses.md has the sources. Every formula is stable for large logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.class_weights import weights_of
from ortflow.workflow.graph.objective.labels import Dims, Labels, size, text
from ortflow.workflow.graph.objective.target import Names, Target
from ortflow.workflow.graph.objective.teacher import teacher_logits
from ortflow.workflow.spec.losses import IGNORED, ClassLoss, CrossEntropy, Dice, Divergence, Focal, MultiMargin


@dataclass(frozen=True)
class Rows:
    """Logits [N, classes, ...] and their labels [N, ...]."""

    logits: str
    label: str
    """Those that do not count are replaced by `ignore`."""
    counted: str
    """Bool, the label's shape."""
    rank: int
    classes: int | None
    ignore: int


def class_axis(dims: Dims, axis: int, output: str, location: str) -> int:
    """The axis of the classes, from 0. Raises UserError if the output has no such axis besides the batch's."""
    rank = len(dims)
    place = axis + rank if axis < 0 else axis
    if rank < 2 or not 0 <= place < rank:
        raise UserError(
            f"output {output!r} of shape {text(dims)} has no axis {axis} besides the batch's",
            where=f"{location}.class_axis",
            fix="name the axis that runs over the classes",
        )
    return place


def rows_of(
    edit: Editor,
    labels: Labels,
    loss: ClassLoss,
    output: str,
    logits: str,
    dims: Dims,
    location: str,
    *,
    flat: bool = True,
) -> Rows:
    """Logits with the classes on axis 1, and the labels as they fit; `flat` may join the sample's axes to the batch's.

    The label input is added. Raises UserError if the output has no axis of classes.
    """
    axis, rank = class_axis(dims, loss.class_axis, output, location), len(dims)
    length = dims[axis]
    classes = length if isinstance(length, int) else None
    if classes == 1:
        raise UserError(
            f"output {output!r} of shape {text(dims)} has one class on axis {loss.class_axis}: the loss is always 0",
            where=f"{location}.class_axis",
            fix="name the axis that runs over the classes, or use bce_with_logits for one logit",
        )
    shape = tuple(d for i, d in enumerate(dims) if i != axis)
    label = labels.input(loss.label, TensorProto.INT64, shape, f"{location}.label")
    ignore = IGNORED if loss.ignore_index is None else loss.ignore_index
    if labels.padded:
        counts = labels.valid_rows(label, rank - 1)
        label = edit("Where", counts, label, edit.constant(ignore, "int64"))
    if flat and axis == rank - 1 and rank > 2:
        if classes is not None:
            joined = edit.ints(-1, classes)
        else:
            last = edit("Slice", edit("Shape", logits), edit.ints(rank - 1), edit.ints(rank))
            joined = edit("Concat", edit.ints(-1), last, axis=0)
        logits = edit("Reshape", logits, joined)
        label, rank = edit("Reshape", label, edit.ints(-1)), 2
    elif axis != 1:
        order = [0, axis, *(i for i in range(1, rank) if i != axis)]
        logits = edit("Transpose", logits, perm=order)
    counted = edit("Not", edit("Equal", label, edit.constant(ignore, "int64")))
    return Rows(logits, label, counted, rank, classes, ignore)


def by_class(
    edit: Editor, labels: Labels, loss: ClassLoss, output: str, logits: str, dims: Dims, names: Names
) -> Target:
    """Add the loss of labels that are numbers of classes."""
    rows = rows_of(edit, labels, loss, output, logits, dims, names.where, flat=not isinstance(loss, Dice))
    if isinstance(loss, CrossEntropy) and loss.class_weights is None:
        _cross_entropy(edit, loss, rows, names)
    elif isinstance(loss, CrossEntropy):
        _weighted_cross_entropy(edit, loss, rows, names)
    elif isinstance(loss, Focal):
        _focal(edit, loss, rows, names)
    elif isinstance(loss, MultiMargin):
        _multi_margin(edit, loss, rows, names)
    elif isinstance(loss, Dice):
        _dice(edit, labels, loss, rows, names)
    else:
        raise TypeError(f"no loss {type(loss).__name__}")
    return Target(rows.logits, rows.label, None, rows.classes)


def _cross_entropy(edit: Editor, loss: CrossEntropy, rows: Rows, names: Names) -> None:
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`.

    With smoothing e, as in torch.nn.CrossEntropyLoss: (1 - e) times that + e times the sum over the labels of the mean
    of -log softmax over the classes.
    """
    weights = edit.cast(rows.counted)
    edit.total(weights, names.weight)
    smoothing = loss.label_smoothing
    hard, _ = edit.write(
        "SoftmaxCrossEntropyLoss",
        [rows.logits, rows.label],
        [edit.fresh("loss") if smoothing else names.total, edit.fresh("log_probability")],
        reduction="sum",
        ignore_index=rows.ignore,
    )
    if smoothing:
        logs = edit("LogSoftmax", rows.logits, axis=1)
        summed = edit("ReduceSum", logs, edit.ints(1), keepdims=0)
        soft = edit("ReduceSum", edit("Mul", summed, weights), keepdims=0)
        soft = edit("Div", edit("Mul", soft, edit.constant(-smoothing)), _class_count(edit, rows))
        edit("Add", edit("Mul", hard, edit.constant(1 - smoothing)), soft, output=names.total)


def _weighted_cross_entropy(edit: Editor, loss: CrossEntropy, rows: Rows, names: Names) -> None:
    """As `_cross_entropy`, each class times its weight; the sum's weight is that of the labels' classes."""
    key_path = f"{names.where}.class_weights"
    values = weights_of(loss.class_weights, rows.classes, key_path)
    weights = _of_labels(edit, edit.constant(values), rows)
    edit.total(weights, names.weight)
    hard = edit.total(
        edit("Mul", _each(edit, rows), weights), edit.fresh("loss") if loss.label_smoothing else names.total
    )
    if loss.label_smoothing:
        of_classes = edit.constant(values.reshape(1, -1, *[1] * (rows.rank - 2)))
        logs = edit("Mul", edit("LogSoftmax", rows.logits, axis=1), of_classes)
        summed = edit("ReduceSum", logs, edit.ints(1), keepdims=0)
        soft = edit("ReduceSum", edit("Mul", summed, edit.cast(rows.counted)), keepdims=0)
        soft = edit("Mul", soft, edit.constant(-loss.label_smoothing / len(values)))
        edit("Add", edit("Mul", hard, edit.constant(1 - loss.label_smoothing)), soft, output=names.total)


def _focal(edit: Editor, loss: Focal, rows: Rows, names: Names) -> None:
    edit.total(edit.cast(rows.counted), names.weight)
    losses = _each(edit, rows)
    wrong = edit("Sub", edit.constant(1.0), edit("Exp", edit("Neg", losses)))
    # Rounding may give -1e-8, and its power is not a number.
    losses = edit("Mul", losses, edit("Pow", edit("Relu", wrong), edit.constant(loss.gamma)))
    if loss.class_weights is not None:
        values = weights_of(loss.class_weights, rows.classes, f"{names.where}.class_weights")
        losses = edit("Mul", losses, _of_labels(edit, edit.constant(values), rows))
    edit.total(losses, names.total)


def _multi_margin(edit: Editor, loss: MultiMargin, rows: Rows, names: Names) -> None:
    edit.total(edit.cast(rows.counted), names.weight)
    right, zero = one_hot(edit, rows), edit.constant(0.0)
    label_logit = edit("ReduceSum", edit("Where", right, rows.logits, zero), edit.ints(1), keepdims=1)
    margins = edit("Relu", edit("Add", edit("Sub", rows.logits, label_logit), edit.constant(loss.margin)))
    margin_sum = edit("ReduceSum", edit("Where", right, zero, margins), edit.ints(1), keepdims=0)
    counted = edit("Where", rows.counted, margin_sum, zero)
    edit("Div", edit("ReduceSum", counted, keepdims=0), _class_count(edit, rows), output=names.total)


def _dice(edit: Editor, labels: Labels, loss: Dice, rows: Rows, names: Names) -> None:
    counted = edit.cast(edit("Unsqueeze", rows.counted, edit.ints(1)))
    probability = edit("Mul", edit("Softmax", rows.logits, axis=1), counted)
    truth = edit("Mul", edit.cast(one_hot(edit, rows)), counted)
    overlap_loss(edit, labels, probability, truth, loss.smooth, names)


def overlap_loss(edit: Editor, labels: Labels, p: str, y: str, smooth: float, names: Names) -> None:
    """Add 1 - (2 sum p y + smooth) / (sum p + sum y + smooth), summed over samples and channels.

    `p` and `y` are [N, channels, ...]; the sums run over all further axes.
    """
    flat = [edit("Reshape", value, edit.ints(0, 0, -1)) for value in (edit("Mul", p, y), p, y)]
    overlap, *sizes = (edit("ReduceSum", value, edit.ints(2), keepdims=0) for value in flat)
    added = edit.constant(smooth)
    upper = edit("Add", edit("Mul", overlap, edit.constant(2.0)), added)
    losses = edit("Sub", edit.constant(1.0), edit("Div", upper, edit("Add", edit("Add", *sizes), added)))
    if labels.padded:
        losses = edit("Where", labels.valid_rows(p, 2), losses, edit.constant(0.0))
    edit.total(losses, names.total)
    labels.count(losses, names.weight)


def divergence(
    edit: Editor, labels: Labels, loss: Divergence, output: str, logits: str, dims: Dims, names: Names
) -> Target:
    """Add sum y (log y - log softmax(logits / T)) T^2; what counts are the distributions."""
    axis = class_axis(dims, loss.class_axis, output, names.where)
    zero, smallest = edit.constant(0.0), edit.constant(1e-37)
    taught = None if loss.teacher is None else teacher_logits(edit, loss, output, dims, names.where)
    if loss.temperature != 1:
        logits = edit("Mul", logits, edit.constant(1 / loss.temperature))
    if taught is None:
        label = labels.input(loss.label, TensorProto.FLOAT, dims, f"{names.where}.label")
        # y log y is 0 at y = 0.
        logs = edit("Log", edit("Max", label, smallest))
    else:
        if loss.temperature != 1:
            taught = edit("Mul", taught, edit.constant(1 / loss.temperature))
        label, logs = edit("Softmax", taught, axis=axis), edit("LogSoftmax", taught, axis=axis)
    difference = edit("Sub", logs, edit("LogSoftmax", logits, axis=axis))
    terms = edit("Where", edit("Greater", label, zero), edit("Mul", label, difference), zero)
    if labels.padded:
        terms = edit("Where", labels.valid_rows(logits, len(dims)), terms, zero)
    total = edit("ReduceSum", terms, keepdims=0)
    edit("Mul", total, edit.constant(loss.temperature**2), output=names.total)
    labels.count(logits, names.weight, share=size(edit, logits, axis))
    return Target(logits, None, None, None)


def one_hot(edit: Editor, rows: Rows) -> str:
    """Bool [N, classes, ...]: whether a class is the label's."""
    count = edit.constant(rows.classes, "int64") if rows.classes is not None else size(edit, rows.logits, 1)
    classes = edit("Range", edit.constant(0, "int64"), count, edit.constant(1, "int64"))
    classes = edit("Reshape", classes, edit.ints(1, -1, *[1] * (rows.rank - 2)))
    return edit("Equal", edit("Unsqueeze", rows.label, edit.ints(1)), classes)


def _each(edit: Editor, rows: Rows) -> str:
    """-log softmax(logits)[label] of each label; 0 for those that do not count."""
    value, _ = edit.write(
        "SoftmaxCrossEntropyLoss",
        [rows.logits, rows.label],
        [edit.fresh("loss"), edit.fresh("log_probability")],
        reduction="none",
        ignore_index=rows.ignore,
    )
    return value


def _of_labels(edit: Editor, values: str, rows: Rows) -> str:
    """The value of each label's class; 0 for labels that do not count."""
    index = edit("Where", rows.counted, rows.label, edit.constant(0, "int64"))
    return edit("Where", rows.counted, edit("Gather", values, index), edit.constant(0.0))


def _class_count(edit: Editor, rows: Rows) -> str:
    return edit.constant(rows.classes) if rows.classes is not None else edit.cast(size(edit, rows.logits, 1))
