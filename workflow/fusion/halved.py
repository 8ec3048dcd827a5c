"""Builds a half-precision training graph from the forward graph with its loss, up to fused kernels.

Called by step `configure` if `train.precision` is fp16 or bf16. The fp32 graph is also built; the gradient is compared
with it. The passes stand in three lists: a pipeline's stages are cut behind the first, and fused when their two passes
are graphs of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.cuda.place import completed
from ortflow.workflow.cuda.table import HALF, HALF_ONLY
from ortflow.workflow.fusion.groups import fused
from ortflow.workflow.fusion.half import HALVES, half
from ortflow.workflow.fusion.joins import put_joins
from ortflow.workflow.fusion.losses import join_losses
from ortflow.workflow.fusion.packed import pack
from ortflow.workflow.fusion.products import put_products
from ortflow.workflow.fusion.recompute import recomputed
from ortflow.workflow.fusion.residual import add_residuals
from ortflow.workflow.fusion.summed import sum_in_norms
from ortflow.workflow.graph.attention.find import attend
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir import shared_entropy
from ortflow.workflow.graph.ir.collective import drop_copies
from ortflow.workflow.graph.ir.edit import Editor, replace, scalar
from ortflow.workflow.graph.ir.passes import Pass, Passes, Watch, in_place, unwatched
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.types import LOSS_SCALE, LOSS_SUM

SCALED = "ortflow.scaled_loss"
"""The differentiated value: the loss times the loss scale."""


@dataclass
class Halves:
    """What the passes read besides the graph, and what they report."""

    precision: str
    """fp16 or bf16. With fp16 the graph has the further input LOSS_SCALE, the factor of its gradients."""
    parameters: Sequence[str]
    """Names of the trained parameters."""
    again: Sequence[str] = ()
    """Scopes that the backward pass recomputes (`model.recompute`)."""
    trained: Collection[str] = ()
    """Parameters that have a gradient."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log."""


def _attention(model: onnx.ModelProto, state: Halves) -> onnx.ModelProto:
    copy, notes = attend(model, state.parameters)
    state.notes += notes
    return copy


def _scaled(model: onnx.ModelProto, state: Halves) -> None:
    _SCALED[state.precision](model.graph)
    model.graph.output.append(scalar(SCALED))


def _differentiable(model: onnx.ModelProto, state: Halves) -> onnx.ModelProto:
    return make_differentiable(model, state.parameters, SCALED)[0]


def _gradient(model: onnx.ModelProto, state: Halves) -> onnx.ModelProto:
    train, state.trained = differentiate(model, list(state.parameters), SCALED)
    replace(train.graph.output, [value for value in train.graph.output if value.name != SCALED])
    return train


def _recomputed(model: onnx.ModelProto, state: Halves) -> None:
    recompute(model.graph, state.again)


def _rounded(model: onnx.ModelProto, state: Halves) -> onnx.ModelProto:
    return half(model, kind=HALVES[state.precision], parameters=state.trained, capable=HALF, half_only=HALF_ONLY)


def _products(model: onnx.ModelProto, state: Halves) -> onnx.ModelProto:
    return put_products(model, kind=HALVES[state.precision])


SCALED_LOSS: Passes[Halves] = Passes(
    "half",
    (
        Pass("attention", _attention, "attention becomes one node"),
        Pass("shared-entropy", lambda model, _: shared_entropy.shared(model), "losses of divided classes, as one node"),
        Pass("scaled", _scaled, "the loss times the loss scale, which is differentiated"),
    ),
    behind="training/layers",
)
HALF_GRADIENT: Passes[Halves] = Passes(
    "half",
    (
        Pass("differentiable", _differentiable, "operators without a gradient are decomposed", ("scaled",)),
        Pass("cheaper-gradients", in_place(rewrites.before), "forms with a cheaper gradient"),
        Pass("gradient", _gradient, "adds the backward pass", ("differentiable",)),
        Pass("recomputed", _recomputed, "repeats what is recomputed in the backward pass", ("gradient",)),
    ),
    behind="half/scaled",
)
IN_HALF: Passes[Halves] = Passes(
    "half",
    (
        # Only the differentiation needed them: the gradient of a copy is a sum over the parts of a layer.
        Pass("copies-dropped", in_place(drop_copies), "copies of gradients, which CPUs need"),
        Pass("entropy-spread", lambda model, _: shared_entropy.spread(model), "the nodes of losses of divided classes"),
        Pass("operators", lambda model, _: completed(model, halves=True), "ortflow's operators", ("gradient",)),
        Pass("residuals", lambda model, _: add_residuals(model), "gradients of residuals", ("operators",)),
        Pass("norm-sums", lambda model, _: sum_in_norms(model), "sums of a normalisation's gradient", ("operators",)),
        Pass("masks", lambda model, _: recomputed(model), "what is cheap is computed again, not kept"),
        Pass("rounded", _rounded, "values that may be half", ("operators",)),
        Pass("packed", lambda model, _: pack(model), "query, key and value of one product", ("rounded",)),
        Pass("adapted", lambda model, _: on_cuda(model), "nodes without a kernel for GPUs"),
        Pass("products", _products, "products with what follows them", ("rounded",)),
        Pass("joins", lambda model, _: put_joins(model), "Concat of different sizes", ("adapted",)),
    ),
    behind="half/recomputed",
)
HALF_FUSED: Passes[object] = Passes(
    "half",
    (
        Pass("one-loss", lambda model, _: join_losses(model), "a loss with its gradient"),
        Pass("fused", lambda model, _: fused(model), "elementwise nodes are fused", ("adapted",)),
    ),
    behind="half/joins",
)


def halved(model: onnx.ModelProto, state: Halves, watch: Watch = unwatched) -> onnx.ModelProto:
    """The training graph of a forward graph whose outputs are the loss and new states.

    Raises UserError if a node has no gradient.
    """
    for passes in (SCALED_LOSS, HALF_GRADIENT, IN_HALF, HALF_FUSED):
        model = passes.run(model, state, watch)
    return model


def scaled(model: onnx.ModelProto, parameters: Sequence[str], precision: str) -> tuple[onnx.ModelProto, list[str]]:
    """The forward graph with attention as one node and the further output SCALED, which is to be differentiated, and
    log lines.
    """
    state = Halves(precision, parameters)
    return SCALED_LOSS.run(model, state), state.notes


def in_half(train: onnx.ModelProto, trained: Collection[str], precision: str) -> onnx.ModelProto:
    """A differentiated graph in half precision, with ortflow's operators, before elementwise nodes are fused."""
    return IN_HALF.run(train, Halves(precision, (), trained=trained))


def _scale(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info(LOSS_SCALE, TensorProto.FLOAT, [1]))
    edit = Editor(graph)
    edit("Mul", LOSS_SUM, edit("Squeeze", LOSS_SCALE), output=SCALED)


def _copy(graph: onnx.GraphProto) -> None:
    Editor(graph)("Identity", LOSS_SUM, output=SCALED)


_SCALED = {"fp16": _scale, "bf16": _copy}
"""`train.precision` -> what adds the value SCALED. bf16 has the range of fp32."""
