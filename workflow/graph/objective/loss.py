"""Attaches the loss as a sum and a weight, so that averages over micro-batches are exact.

Called by `assembly` on a forward graph of opset 18, before it is differentiated (training) or completed (evaluation).
loss = `ortflow.loss_sum` / `ortflow.loss_weight`. Every formula is stable for large logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import TensorProto, helper
from typing_extensions import assert_never

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, described, dims_of
from ortflow.workflow.graph.objective.logits import read_logits
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, VALID
from ortflow.workflow.spec.model import CrossEntropy, Loss, OutputLoss

Dims = tuple[int | str | None, ...]
ElementwiseKind = Literal["mse", "l1", "bce_with_logits"]


@dataclass(frozen=True)
class Target:
    """The values that the loss compares, for use by the metrics."""

    prediction: str
    """Logits or prediction; for cross-entropy in `rows`, [N, classes, ...] with the classes on axis 1."""
    label: str | None
    """Labels, with ignored ones replaced by the ignore index; None if the graph computes the loss."""
    mask: str | None
    """Bool, broadcastable to the prediction: which elements count, if there may be padding (regression losses only)."""
    classes: int | None
    """Number of classes, if known."""


def output_of(graph: onnx.GraphProto, loss: Loss) -> str:
    """The output that the loss is computed from. Raises UserError if the run file does not determine it."""
    names = [str(value.name) for value in graph.output]
    if loss.output is None:
        if len(names) == 1:
            return names[0]
        raise UserError(
            f"the model has {len(names)} outputs ({', '.join(names)})",
            where="model.loss",
            fix="set `output` to the one for the loss",
        )
    if loss.output not in names:
        raise UserError(
            f"the model has no output {loss.output!r}", where="model.loss.output", fix=f"it has {', '.join(names)}"
        )
    return loss.output


def attach(graph: onnx.GraphProto, loss: Loss, batch: str, padded: bool) -> Target:
    """Add the loss to the graph's only output, in place; `batch` is an input whose first axis is the batch.

    Adds the label input unless it exists, and with `padded` the input `ortflow.valid`. A loss of logits reads those
    behind an output of probabilities.
    """
    edit = Editor(graph)
    output = graph.output[0]
    dims = dims_of(output)
    if padded:
        if isinstance(loss, OutputLoss):
            raise UserError(
                "a loss that the graph computes cannot exclude the samples that `pad` adds",
                where="data.last_batch",
                fix="use `drop` or `keep`",
            )
        graph.input.append(helper.make_tensor_value_info(VALID, TensorProto.INT64, [1]))
    if isinstance(loss, OutputLoss):
        return _own(edit, output.name, dims, batch)
    if not dims:
        shape = "no axes" if dims == () else "an unknown number of axes"
        raise UserError(
            f"output {output.name!r} has {shape}",
            where="model.loss",
            fix="export the model with shapes, or name another output",
        )
    _require_batch_first(graph, batch, output.name, dims)
    value = read_logits(edit, loss)
    if isinstance(loss, CrossEntropy):
        return _cross_entropy(edit, loss, output.name, value, dims, padded)
    return _elementwise(edit, loss.kind, loss.label, value, dims, padded)


def _require_batch_first(graph: onnx.GraphProto, batch: str, output: str, dims: Dims) -> None:
    """Raises UserError if the samples of an output are on another axis, as behind PyTorch's recurrent layers."""
    (first,) = (dims_of(value) for value in graph.input if value.name == batch)
    samples = first[0] if first else None
    if isinstance(samples, str) and samples != dims[0] and samples in dims:
        raise UserError(
            f"output {output!r} of shape {_text(dims)} has the samples on axis {dims.index(samples)}",
            where="model.loss",
            fix="transpose it in the model, so that they are on its first axis, and so are the labels'",
        )


def _own(edit: Editor, output: str, dims: Dims | None, batch: str) -> Target:
    if dims is not None and any(d != 1 for d in dims):
        raise UserError(
            f"output {output!r} has the shape {_text(dims)} and is not a scalar",
            where="model.loss.output",
            fix="name a scalar output, or another kind of loss",
        )
    mean = edit("Reshape", output, edit.constant([], "int64"))
    rows = edit("Gather", edit("Shape", batch), edit.constant(0, "int64"))
    weight = edit("Cast", rows, output=LOSS_WEIGHT, to=TensorProto.FLOAT)
    edit("Mul", mean, weight, output=LOSS_SUM)
    return Target(output, None, None, None)


def _cross_entropy(edit: Editor, loss: CrossEntropy, output: str, logits: str, dims: Dims, padded: bool) -> Target:
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`.

    With smoothing e, as in torch.nn.CrossEntropyLoss: (1 - e) times that + e times the sum over the labels of the mean
    of
    -log softmax over the classes.
    """
    rank = len(dims)
    axis = loss.class_axis + rank if loss.class_axis < 0 else loss.class_axis
    if rank < 2 or not 0 <= axis < rank:
        raise UserError(
            f"output {output!r} of shape {_text(dims)} has no axis {loss.class_axis} besides the batch's",
            where="model.loss.class_axis",
            fix="name the axis that runs over the classes",
        )
    length = dims[axis]
    classes = length if isinstance(length, int) else None
    if classes == 1:
        raise UserError(
            f"output {output!r} of shape {_text(dims)} has one class on axis {loss.class_axis}: the loss is always 0",
            where="model.loss.class_axis",
            fix="name the axis that runs over the classes, or use bce_with_logits for one logit",
        )
    label = _label_input(edit, loss.label, TensorProto.INT64, [d for i, d in enumerate(dims) if i != axis])
    if padded:
        counts = _valid_rows(edit, label, rank - 1)
        label = edit("Where", counts, label, edit.constant(loss.ignore_index, "int64"))
    if axis == rank - 1 and rank > 2:
        if classes is not None:
            shape = edit.ints(-1, classes)
        else:
            last = edit("Slice", edit("Shape", logits), edit.ints(rank - 1), edit.ints(rank))
            shape = edit("Concat", edit.ints(-1), last, axis=0)
        logits = edit("Reshape", logits, shape)
        label = edit("Reshape", label, edit.ints(-1))
    elif axis != 1:
        order = [0, axis, *(i for i in range(1, rank) if i != axis)]
        logits = edit("Transpose", logits, perm=order)
    counted = edit("Not", edit("Equal", label, edit.constant(loss.ignore_index, "int64")))
    weights = edit.cast(counted)
    edit.total(weights, LOSS_WEIGHT)
    smoothing = loss.label_smoothing
    hard, _ = edit.write(
        "SoftmaxCrossEntropyLoss",
        [logits, label],
        [edit.fresh("loss") if smoothing else LOSS_SUM, edit.fresh("log_probability")],
        reduction="sum",
        ignore_index=loss.ignore_index,
    )
    if smoothing:
        logs = edit("LogSoftmax", logits, axis=1)
        summed = edit("ReduceSum", logs, edit.ints(1), keepdims=0)
        soft = edit("ReduceSum", edit("Mul", summed, weights), keepdims=0)
        count = edit.constant(classes) if classes is not None else edit.cast(_size(edit, logits, 1))
        soft = edit("Div", edit("Mul", soft, edit.constant(-smoothing)), count)
        edit("Add", edit("Mul", hard, edit.constant(1 - smoothing)), soft, output=LOSS_SUM)
    return Target(logits, label, None, classes)


def _elementwise(edit: Editor, kind: ElementwiseKind, label_name: str, name: str, dims: Dims, padded: bool) -> Target:
    """Sums over all elements: (x - y)^2, |x - y|, or -y log s(x) - (1 - y) log(1 - s(x)) with s the sigmoid."""
    label = _label_input(edit, label_name, TensorProto.FLOAT, dims)
    if kind == "bce_with_logits":
        # = |x|/2 + x (1/2 - y) + log(1 + exp(-|x|)): no overflow, and its derivative at x = 0 is s(0) - y.
        size = edit("Abs", name)
        half = edit.constant(0.5)
        tail = edit("Log", edit("Add", edit("Exp", edit("Neg", size)), edit.constant(1.0)))
        linear = edit("Mul", name, edit("Sub", half, label))
        loss = edit("Add", edit("Add", edit("Mul", size, half), linear), tail)
    elif kind == "mse":
        difference = edit("Sub", name, label)
        loss = edit("Mul", difference, difference)
    elif kind == "l1":
        loss = edit("Abs", edit("Sub", name, label))
    else:
        assert_never(kind)
    mask = None
    if padded:
        mask = _valid_rows(edit, name, len(dims))
        loss = edit("Where", mask, loss, edit.constant(0.0))
    edit.total(loss, LOSS_SUM)
    count = edit("Size", name)
    if padded:
        row = edit("Div", count, _size(edit, name, 0))
        count = edit("Reshape", edit("Mul", row, VALID), edit.constant([], "int64"))
    edit("Cast", count, output=LOSS_WEIGHT, to=TensorProto.FLOAT)
    return Target(name, label, mask, None)


def _label_input(edit: Editor, name: str, data_type: int, dims: Sequence[int | str | None]) -> str:
    """The label as the loss needs it: an input of that name, which is added unless the graph has it."""
    graph = edit.graph
    known = described(graph)
    given = {value.name for value in graph.input}
    if name in given:
        return _own_label(edit, known[name], data_type, dims)
    if name in known or any(name in node.output for node in graph.node):
        raise UserError(f"the model already has a value {name!r}", where="model.loss.label", fix="rename the label")
    graph.input.append(helper.make_tensor_value_info(name, data_type, list(dims)))
    return name


def _own_label(edit: Editor, given: onnx.ValueInfoProto, data_type: int, dims: Sequence[int | str | None]) -> str:
    """A label input of the model that only the loss reads."""
    name = given.name
    if any(name in node.input for node in edit.graph.node):
        raise UserError(f"the model reads its input {name!r} itself", where="model.loss.label", fix="rename the label")
    shape = dims_of(given)
    if shape is not None and len(shape) != len(dims):
        raise UserError(
            f"the model's input {name!r} has the shape {_text(shape)} and the loss needs {_text(dims)}",
            where="model.loss.label",
            fix="rename the label",
        )
    kinds = [TensorProto.INT64, TensorProto.INT32]
    if data_type == TensorProto.FLOAT:
        kinds += [TensorProto.FLOAT, TensorProto.BOOL, TensorProto.UINT8]
    actual = given.type.tensor_type.elem_type
    if actual not in kinds:
        raise UserError(
            f"the model's input {name!r} is of type {TensorProto.DataType.Name(actual)} and the loss needs"
            f" {TensorProto.DataType.Name(data_type)}",
            where="model.loss.label",
            fix="rename the label",
        )
    return name if actual == data_type else edit.cast(name, data_type)


def _valid_rows(edit: Editor, value: str, rank: int) -> str:
    """Bool [batch, 1, ...] of `rank` axes: which rows of the batch are not padding."""
    zero, one = edit.constant(0, "int64"), edit.constant(1, "int64")
    rows = edit("Range", zero, _size(edit, value, 0), one)
    return edit("Reshape", edit("Less", rows, VALID), edit.ints(-1, *[1] * (rank - 1)))


def _size(edit: Editor, value: str, axis: int) -> str:
    """Length of an axis, int64 scalar."""
    return edit("Gather", edit("Shape", value), edit.constant(axis, "int64"))


def _text(dims: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"
