"""Attaches the loss as a sum and a weight, so that averages over micro-batches are exact.

Called by `assembly` on a forward graph of opset 18, before it is differentiated (training) or completed (evaluation).
loss = `ortflow.loss_sum` / `ortflow.loss_weight`.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto
from typing_extensions import assert_never

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, dims_of
from ortflow.workflow.graph.objective.by_class import by_class, divergence, overlap_loss
from ortflow.workflow.graph.objective.by_element import Elementwise, elementwise
from ortflow.workflow.graph.objective.labels import Dims, Labels, text
from ortflow.workflow.graph.objective.logits import read_logits
from ortflow.workflow.graph.objective.target import Names, Target
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.losses import BinaryDice, ClassLoss, Divergence, OutputLoss
from ortflow.workflow.spec.model import Loss, SingleLoss


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
    return attach_one(edit, Labels(edit, padded=padded), loss, graph.output[0], batch, Names(LOSS_SUM, LOSS_WEIGHT))


def attach_one(
    edit: Editor, labels: Labels, loss: SingleLoss, output: onnx.ValueInfoProto, batch: str, names: Names
) -> Target:
    """Add one loss to one output."""
    dims = dims_of(output)
    if isinstance(loss, OutputLoss):
        if labels.padded:
            raise UserError(
                "a loss that the graph computes cannot exclude the samples that `pad` adds",
                where="data.last_batch",
                fix="use `drop` or `keep`",
            )
        return _own(edit, output.name, dims, batch, names)
    dims = checked_dims(edit.graph, output, batch, names.where)
    value = read_logits(edit, loss, output.name)
    if isinstance(loss, ClassLoss):
        return by_class(edit, labels, loss, output.name, value, dims, names)
    if isinstance(loss, Divergence):
        return divergence(edit, labels, loss, output.name, value, dims, names)
    if isinstance(loss, BinaryDice):
        return _binary_dice(edit, labels, loss, value, dims, names)
    if isinstance(loss, Elementwise):
        return elementwise(edit, labels, loss, value, dims, names)
    assert_never(loss)


def checked_dims(graph: onnx.GraphProto, output: onnx.ValueInfoProto, batch: str, where: str) -> Dims:
    """The shape of an output. Raises UserError if it is unknown, or if the samples are not on its first axis."""
    dims = dims_of(output)
    if not dims:
        shape = "no axes" if dims == () else "an unknown number of axes"
        raise UserError(
            f"output {output.name!r} has {shape}",
            where=where,
            fix="export the model with shapes, or name another output",
        )
    (first,) = (dims_of(value) for value in graph.input if value.name == batch)
    samples = first[0] if first else None
    if isinstance(samples, str) and samples != dims[0] and samples in dims:
        # As behind PyTorch's recurrent layers.
        raise UserError(
            f"output {output.name!r} of shape {text(dims)} has the samples on axis {dims.index(samples)}",
            where=where,
            fix="transpose it in the model, so that they are on its first axis, and so are the labels'",
        )
    return dims


def _own(edit: Editor, output: str, dims: Dims | None, batch: str, names: Names) -> Target:
    if dims is not None and any(d != 1 for d in dims):
        raise UserError(
            f"output {output!r} has the shape {text(dims)} and is not a scalar",
            where=f"{names.where}.output",
            fix="name a scalar output, or another kind of loss",
        )
    mean = edit("Reshape", output, edit.constant([], "int64"))
    rows = edit("Gather", edit("Shape", batch), edit.constant(0, "int64"))
    weight = edit("Cast", rows, output=names.weight, to=TensorProto.FLOAT)
    edit("Mul", mean, weight, output=names.total)
    return Target(output, None, None, None)


def _binary_dice(edit: Editor, labels: Labels, loss: BinaryDice, value: str, dims: Dims, names: Names) -> Target:
    if len(dims) < 2:
        raise UserError(
            f"the output's shape is {text(dims)}, and dice needs an axis of the channels besides the batch's",
            where=names.where,
            fix="export the model with an axis of length 1 behind the batch's",
        )
    label = labels.input(loss.label, TensorProto.FLOAT, dims, f"{names.where}.label")
    overlap_loss(edit, labels, edit("Sigmoid", value), label, loss.smooth, names)
    return Target(value, label, labels.valid_rows(value, len(dims)) if labels.padded else None, None)
