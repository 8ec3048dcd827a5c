"""A weighted sum of losses, which have weights of their own, as one sum and one weight.

Called by `loss`, and `check_sum` by `assembly`. The mean of term k over a global batch is S_k / W_k. What micro-batches
and ranks add up is a_k S_k N / W_k over the terms, and N, the samples. That is exact if N / W_k is the same in each
micro-batch, or if there is only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, described, dims_of
from ortflow.workflow.graph.objective.labels import Labels, size
from ortflow.workflow.graph.objective.target import Names
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, VALID
from ortflow.workflow.spec.losses import ClassLoss, CrossEntropy, Ctc, Dice, Unlabelled
from ortflow.workflow.spec.model import Loss, SingleLoss, WeightedSum, single_losses
from ortflow.workflow.spec.run import TrainerRunSpec


def term_output(loss: WeightedSum, place: int, kind: str) -> str:
    """The value with the sum or the weight of a term: an output of the evaluation graph."""
    return f"ortflow.loss.{loss.names[place]}_{kind}"


def term_outputs(loss: Loss) -> list[str]:
    """The outputs of the evaluation graph for the terms of a sum; none for another loss."""
    if not isinstance(loss, WeightedSum):
        return []
    return [term_output(loss, place, kind) for place in range(len(loss.terms)) for kind in ("sum", "weight")]


def add_terms(edit: Editor, labels: Labels, loss: WeightedSum, terms: Sequence[Names], batch: str) -> None:
    """Add the sum and the weight of the whole loss."""
    samples = edit("Reshape", VALID, edit.constant([], "int64")) if labels.padded else size(edit, batch, 0)
    samples = edit("Cast", samples, output=LOSS_WEIGHT, to=TensorProto.FLOAT)
    # Labels of which none counts have the sum 0, and so have no share.
    least, parts = edit.constant(1e-30), []
    for names, term in zip(terms, loss.terms, strict=True):
        factor = edit("Div", edit("Mul", samples, edit.constant(term.weight)), edit("Max", names.weight, least))
        parts.append(edit("Mul", names.total, factor))
    edit("Sum", *parts, output=LOSS_SUM)


def check_sum(graph: onnx.GraphProto, spec: TrainerRunSpec, outputs: Mapping[str, str]) -> None:
    """Raises UserError if a step has several micro-batches, and a term's weight for each sample depends on the data.

    `outputs` are the losses' by key path.
    """
    loss, pieces = spec.onnx_model.loss, spec.replicas * spec.accumulation
    if not isinstance(loss, WeightedSum) or pieces == 1:
        return
    for key_path, term in single_losses(loss).items():
        output = described(graph).get(outputs[key_path])
        reason = _varies(term, dims_of(output) if output is not None else None)
        if reason:
            raise UserError(
                f"the mean of {term.kind} is over {reason}, and a step has {pieces} micro-batches, over which a sum of"
                " losses cannot take that mean",
                where=key_path,
                fix="train with one micro-batch a step" + _remedy(term),
            )


def _varies(loss: SingleLoss, dims: tuple[int | str | None, ...] | None) -> str:
    """Over what the mean of a loss is, if its number for each sample may differ between batches; else empty."""
    if isinstance(loss, Unlabelled | Ctc):
        return ""
    if isinstance(loss, CrossEntropy) and loss.class_weights is not None:
        return "the weights of the labels' classes"
    if isinstance(loss, ClassLoss) and not isinstance(loss, Dice) and loss.ignore_index is not None:
        return "the labels that are not `ignore_index`"
    if isinstance(loss, Dice) or (dims is not None and all(isinstance(length, int) for length in dims[1:])):
        return ""
    return "positions whose number the model leaves open"


def _remedy(loss: SingleLoss) -> str:
    if isinstance(loss, ClassLoss) and not (isinstance(loss, CrossEntropy) and loss.class_weights is not None):
        return ", or set ignore_index to null if every label counts"
    return ""
