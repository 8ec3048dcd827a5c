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
from ortflow.workflow.graph.objective.batch_axis import checked_dims
from ortflow.workflow.graph.objective.by_class import by_class, divergence, overlap_loss
from ortflow.workflow.graph.objective.by_element import Elementwise, elementwise
from ortflow.workflow.graph.objective.by_pair import info_nce, triplet
from ortflow.workflow.graph.objective.ctc import ctc, ctc_dims
from ortflow.workflow.graph.objective.labels import Dims, Labels, text
from ortflow.workflow.graph.objective.logits import read_logits
from ortflow.workflow.graph.objective.target import Names, Target
from ortflow.workflow.graph.objective.weighted_sum import add_terms, term_output
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.spec.losses import BinaryDice, ClassLoss, Ctc, Divergence, InfoNce, OutputLoss, Triplet
from ortflow.workflow.spec.model import Loss, SingleLoss, WeightedSum, single_losses


def outputs_of(graph: onnx.GraphProto, loss: Loss) -> dict[str, str]:
    """The outputs that each loss is computed from: the first by the loss's key path, others by that of their key.

    Raises UserError if the run file does not determine it.
    """
    outputs = {}
    for key_path, single_loss in single_losses(loss).items():
        outputs[key_path] = _output_of(graph, single_loss.output, key_path)
        for key in ("other", "positive", "negative"):
            if hasattr(single_loss, key):
                outputs[f"{key_path}.{key}"] = _output_of(graph, getattr(single_loss, key), key_path, key)
    return outputs


def _output_of(graph: onnx.GraphProto, output: str | None, location: str, key: str = "output") -> str:
    names = [str(value.name) for value in graph.output]
    if output is None:
        if len(names) == 1:
            return names[0]
        raise UserError(
            f"the model has {len(names)} outputs ({', '.join(names)})",
            where=location,
            fix="set `output` to the one for the loss",
        )
    if output not in names:
        raise UserError(
            f"the model has no output {output!r}", where=f"{location}.{key}", fix=f"it has {', '.join(names)}"
        )
    return output


def attach(
    graph: onnx.GraphProto, loss: Loss, batch: str, padded: bool, *, labels: Labels | None = None
) -> dict[str, Target]:
    """Add the loss to the graph's outputs, in place; `batch` is an input whose first axis is the batch.

    Adds the label inputs unless they exist, and with `padded` the input `ortflow.valid`. A loss of logits reads those
    behind an output of probabilities. Returns what each loss compares, by its key path.
    """
    edit = Editor(graph) if labels is None else labels.edit
    labels = Labels(edit, padded=padded) if labels is None else labels
    outputs = {str(value.name): value for value in graph.output}
    places = outputs_of(graph, loss)
    if not isinstance(loss, WeightedSum):
        names = Names(LOSS_SUM, LOSS_WEIGHT)
        return {names.where: attach_one(edit, labels, loss, outputs[places[names.where]], batch, names)}
    targets, terms = {}, []
    for place, (key_path, single_loss) in enumerate(single_losses(loss).items()):
        terms.append(Names(term_output(loss, place, "sum"), term_output(loss, place, "weight"), key_path))
        targets[key_path] = attach_one(edit, labels, single_loss, outputs[places[key_path]], batch, terms[-1])
    add_terms(edit, labels, loss, terms, batch)
    return targets


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
    if isinstance(loss, InfoNce | Triplet):
        if isinstance(loss, InfoNce):
            info_nce(edit, labels, loss, output, batch, names)
        else:
            triplet(edit, labels, loss, output, batch, names)
        return Target(output.name, None, None, None)
    if isinstance(loss, Ctc):
        dims = ctc_dims(edit.graph, loss, output, batch, names.where)
        ctc(edit, labels, loss, read_logits(edit, loss, output.name), dims, names)
        return Target(output.name, None, None, dims[2] if isinstance(dims[2], int) else None)
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
            fix="export the model with an axis of length 1 after the batch's",
        )
    label = labels.input(loss.label, TensorProto.FLOAT, dims, f"{names.where}.label")
    overlap_loss(edit, labels, edit("Sigmoid", value), label, loss.smooth, names)
    return Target(value, label, labels.valid_rows(value, len(dims)) if labels.padded else None, None)
