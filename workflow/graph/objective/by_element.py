"""Losses of a prediction against values of its shape: a function of each element and its label. Called by `loss`.

docs/losses.md has the sources. Every formula is stable for large logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx import TensorProto
from typing_extensions import assert_never

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.labels import Dims, Labels, text
from ortflow.workflow.graph.objective.target import Names, Target
from ortflow.workflow.spec.losses import (
    BinaryCrossEntropy,
    BinaryFocal,
    Hinge,
    Huber,
    Poisson,
    Quantile,
    Regression,
    SmoothL1,
)

Elementwise = Regression | Huber | SmoothL1 | Poisson | Quantile | BinaryCrossEntropy | BinaryFocal | Hinge
POISSON_EPS = 1e-8
"""Keeps the logarithm of a rate of 0 finite, as torch.nn.PoissonNLLLoss does."""


def elementwise(edit: Editor, labels: Labels, loss: Elementwise, value: str, dims: Dims, names: Names) -> Target:
    """Add the sum of a loss over all elements, and their number."""
    shape = dims
    if isinstance(loss, Quantile) and len(loss.quantiles) > 1:
        _require_last(dims, len(loss.quantiles), f"{names.where}.quantiles", "quantiles")
        shape = (*dims[:-1], 1)
    if isinstance(loss, BinaryCrossEntropy) and isinstance(loss.pos_weight, list):
        _require_last(dims, len(loss.pos_weight), f"{names.where}.pos_weight", "weights")
    label = labels.input(loss.label, TensorProto.FLOAT, shape, f"{names.where}.label")
    losses = FORMULAS[type(loss)](edit, loss, value, label)
    mask = None
    if labels.padded:
        mask = labels.valid_rows(value, len(dims))
        losses = edit("Where", mask, losses, edit.constant(0.0))
    edit.total(losses, names.total)
    labels.count(value, names.weight)
    return Target(value, label, mask, None)


def _require_last(dims: Dims, length: int, location: str, noun: str) -> None:
    """Raises UserError unless the last axis has a number for each element."""
    if not dims or dims[-1] != length:
        raise UserError(
            f"has {length} {noun}, and the output's shape is {text(dims)}",
            where=location,
            fix="give one for each element of the last axis, which the model must export as a number",
        )


def _square(edit: Editor, loss: Regression, x: str, y: str) -> str:
    difference = edit("Sub", x, y)
    if loss.kind == "mse":
        return edit("Mul", difference, difference)
    if loss.kind == "l1":
        return edit("Abs", difference)
    assert_never(loss.kind)


def _huber(edit: Editor, loss: Huber, x: str, y: str) -> str:
    return _bent(edit, x, y, loss.delta, square=0.5, line=loss.delta, shift=loss.delta / 2)


def _smooth(edit: Editor, loss: SmoothL1, x: str, y: str) -> str:
    return _bent(edit, x, y, loss.beta, square=0.5 / loss.beta, line=1.0, shift=loss.beta / 2)


def _bent(edit: Editor, x: str, y: str, bend: float, *, square: float, line: float, shift: float) -> str:
    """With d = |x - y|: square * d^2 below the bend, line * (d - shift) above."""
    size = edit("Abs", edit("Sub", x, y))
    below = edit("Mul", edit("Mul", size, size), edit.constant(square))
    above = edit("Mul", edit("Sub", size, edit.constant(shift)), edit.constant(line))
    return edit("Where", edit("Less", size, edit.constant(bend)), below, above)


def _poisson(edit: Editor, loss: Poisson, x: str, y: str) -> str:
    if loss.log_input:
        return edit("Sub", edit("Exp", x), edit("Mul", y, x))
    return edit("Sub", x, edit("Mul", y, edit("Log", edit("Add", x, edit.constant(POISSON_EPS)))))


def _quantile(edit: Editor, loss: Quantile, x: str, y: str) -> str:
    """max(q d, (q - 1) d) = q d + max(0, -d) with d = y - x: one gradient at d = 0."""
    levels = loss.quantiles if len(loss.quantiles) > 1 else loss.quantiles[0]
    difference = edit("Sub", y, x)
    return edit("Add", edit("Mul", difference, edit.constant(levels)), edit("Relu", edit("Neg", difference)))


def _bce(edit: Editor, loss: BinaryCrossEntropy, x: str, y: str) -> str:
    """-w y log s(x) - (1 - y) log(1 - s(x)), s the sigmoid and w `pos_weight`."""
    # = |x|/2 + x (1/2 - y) + log(1 + exp(-|x|)): no overflow, and its derivative at x = 0 is s(0) - y.
    size = edit("Abs", x)
    half = edit.constant(0.5)
    tail = edit("Log", edit("Add", edit("Exp", edit("Neg", size)), edit.constant(1.0)))
    if loss.pos_weight is None:
        linear = edit("Mul", x, edit("Sub", half, y))
        return edit("Add", edit("Add", edit("Mul", size, half), linear), tail)
    # -log s(x) = (|x| - x)/2 + log(1 + exp(-|x|)), and -log(1 - s(x)) is x more.
    positive = edit("Add", edit("Mul", edit("Sub", size, x), half), tail)
    extra_weight = edit("Sub", edit.constant(loss.pos_weight), edit.constant(1.0))
    factor = edit("Add", edit("Mul", extra_weight, y), edit.constant(1.0))
    return edit("Add", edit("Mul", edit("Sub", edit.constant(1.0), y), x), edit("Mul", factor, positive))


def _focal(edit: Editor, loss: BinaryFocal, x: str, y: str) -> str:
    """The binary cross-entropy, times the probability of the other target to the power gamma."""
    entropy = _bce(edit, BinaryCrossEntropy(kind="bce_with_logits"), x, y)
    one = edit.constant(1.0)
    p, negative = edit("Sigmoid", x), edit("Sub", one, y)
    wrong = edit("Add", edit("Mul", p, negative), edit("Mul", edit("Sub", one, p), y))
    losses = edit("Mul", entropy, edit("Pow", wrong, edit.constant(loss.gamma)))
    if loss.alpha is None:
        return losses
    of_both = edit("Mul", y, edit.constant(loss.alpha)), edit("Mul", negative, edit.constant(1 - loss.alpha))
    return edit("Mul", losses, edit("Add", *of_both))


def _hinge(edit: Editor, loss: Hinge, x: str, y: str) -> str:
    one = edit.constant(1.0)
    sign = edit("Sub", edit("Mul", y, edit.constant(2.0)), one)
    return edit("Relu", edit("Sub", one, edit("Mul", sign, x)))


FORMULAS: dict[type, Callable[[Editor, Any, str, str], str]] = {
    Regression: _square,
    Huber: _huber,
    SmoothL1: _smooth,
    Poisson: _poisson,
    Quantile: _quantile,
    BinaryCrossEntropy: _bce,
    BinaryFocal: _focal,
    Hinge: _hinge,
}
"""Section -> function of (editor, section, prediction, label) that adds the loss of each element."""
