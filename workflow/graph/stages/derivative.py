"""The forward and backward pass of one stage as one graph: a vector-Jacobian product. Pure.

The gradients of sent values are inputs, those of received values are outputs. The chain of all stages computes the same
as the undivided training graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.autodiff.reverse import LOSS_GRADIENT, vector_jacobian_product
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.stages.pieces import Piece
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.parallel.stage import gradient_from_next


@dataclass(frozen=True)
class Derivative:
    """The graph of both passes of a stage, and which of its values have gradients."""

    model: onnx.ModelProto
    trained: tuple[str, ...]
    """Weights with an output `<name>_grad`."""
    received: tuple[str, ...]
    """Received values whose gradients are sent back, including values that are only passed on."""
    roots: tuple[str, ...]
    """Names of the gradients that the backward pass starts from."""


def carries_gradient(model: onnx.ModelProto, trained: Collection[str], loss: str = LOSS_SUM) -> frozenset[str]:
    """Values of the whole forward graph between a trained parameter and the loss."""
    return gradient_path(model.graph, shapes.value_types(model), trained, [loss]).values


def differentiate_pieces(
    pieces: Sequence[Piece], trained: Sequence[str], carrying: Collection[str], loss: str = LOSS_SUM
) -> list[Derivative]:
    """Both passes of each stage.

    Parameters
    ----------
    pieces
        Forward graphs of the stages.
    trained
        Parameters of the whole model that are trained.
    carrying
        Values of the whole graph that have a gradient; see `carries_gradient`.
    loss
        The output that is differentiated.

    Raises
    ------
    UserError
        Naming node and operator, if one has no gradient.
    """
    derivatives: list[Derivative] = []
    behind: tuple[str, ...] = ()
    for piece in reversed(pieces):
        read = {value.name for value in piece.model.graph.input}
        weights = [name for name in trained if name in read]
        received = [name for name in piece.receives if name in read and name in carrying]
        incoming = {name: gradient_from_next(name) for name in behind if name not in piece.passed}
        ends_here = any(value.name == loss for value in piece.model.graph.output)
        constant = {loss: LOSS_GRADIENT} if ends_here else {}
        model, reached = vector_jacobian_product(piece.model, [*weights, *received], constant, incoming)
        names = {*reached, *(name for name in behind if name in piece.passed)}
        behind = tuple(name for name in piece.receives if name in names)
        roots = (*constant.values(), *incoming.values())
        derivatives.insert(0, Derivative(model, tuple(name for name in weights if name in reached), behind, roots))
    return derivatives
