"""Builds a half-precision training graph from the forward graph with its loss, up to fused kernels.

Called by step `configure` if `train.precision` is fp16 or bf16. The fp32 graph is also built; the gradient is compared
with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.cuda.place import HALF, HALF_ALONE, completed
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
from ortflow.workflow.graph.ir.passes import applied
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.types import LOSS_SCALE, LOSS_SUM

SCALED = "ortflow.scaled_loss"
"""The differentiated value: the loss times the loss scale."""


def halved(
    model: onnx.ModelProto, parameters: Collection[str], precision: str, again: Sequence[str] = ()
) -> tuple[onnx.ModelProto, list[str]]:
    """Build the training graph of a forward graph whose outputs are the loss and new states.

    Parameters
    ----------
    model
        The forward graph.
    parameters
        Names of the trained parameters.
    precision
        fp16 or bf16. With fp16 the graph has the further input LOSS_SCALE, the factor of its gradients.
    again
        Scopes that the backward pass recomputes (`model.recompute`).

    Returns
    -------
    ModelProto
        The training graph.
    list of str
        Log lines.

    Raises
    ------
    UserError
        If a node has no gradient.
    """
    forward, notes = scaled(model, parameters, precision)
    forward, _ = make_differentiable(forward, parameters, SCALED)
    rewrites.before(forward.graph)
    train, trained = differentiate(forward, list(parameters), SCALED)
    replace(train.graph.output, [value for value in train.graph.output if value.name != SCALED])
    recompute(train.graph, again)
    return applied(in_half(train, trained, precision), join_losses, fused), notes


def scaled(model: onnx.ModelProto, parameters: Collection[str], precision: str) -> tuple[onnx.ModelProto, list[str]]:
    """The forward graph with attention as one node and the further output SCALED, which is to be differentiated, and
    log lines.
    """
    forward, notes = attend(model, parameters)
    shared_entropy.shared(forward)
    _SCALED[precision](forward.graph)
    forward.graph.output.append(scalar(SCALED))
    return forward, notes


def in_half(train: onnx.ModelProto, trained: Collection[str], precision: str) -> onnx.ModelProto:
    """A differentiated graph in half precision, with ortflow's operators, before elementwise nodes are fused."""
    kind = HALVES[precision]
    drop_copies(train.graph)
    shared_entropy.spread(train)
    rounded = partial(half, kind=kind, parameters=trained, capable=HALF, alone=HALF_ALONE)
    products = partial(put_products, kind=kind)
    placed = partial(completed, halves=True)
    return applied(
        train, placed, add_residuals, sum_in_norms, recomputed, rounded, pack, on_cuda, products, put_joins
    )  # fmt: skip


def _scale(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info(LOSS_SCALE, TensorProto.FLOAT, [1]))
    edit = Editor(graph)
    edit("Mul", LOSS_SUM, edit("Squeeze", LOSS_SCALE), output=SCALED)


def _copy(graph: onnx.GraphProto) -> None:
    Editor(graph)("Identity", LOSS_SUM, output=SCALED)


_SCALED = {"fp16": _scale, "bf16": _copy}
"""`train.precision` -> what adds the value SCALED. bf16 has the range of fp32."""
