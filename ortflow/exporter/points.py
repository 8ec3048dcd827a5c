"""Points at which an exported file is compared with its module besides the example: zeros, ties, equal rows, padding.

Called by `ortflow.exporter.file_check`. Random numbers are never exactly zero or equal, but data are: a blank picture,
a padded sequence, a batch that holds a sample twice. Values are rounded to multiples of a power of two there: sums
of a few products are exact, and equal elements stay equal whatever the order of the summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortflow.exporter.reference import Call

if TYPE_CHECKING:
    import torch

DRAWS = 3
"""Rounding breaks ties, in PyTorch and in the file not always alike. What is wrong is wrong in each draw."""
_NOISE = 0.3
"""Of the second and later draws, relative to a tensor's spread."""

Point = Callable[[Any, "torch.Tensor"], "torch.Tensor"]
"""(Module, an input) -> that input at the point."""


def call_at(
    point: str, draw: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """A call at a point of `POINTS`; None if it has the inputs of the example. Sets the module's parameters, too.

    Called inside `borrowed`; the parameters have their own values then.
    """
    import torch
    from torch.utils import _pytree as pytree

    generator = torch.Generator().manual_seed(draw)
    change = POINTS[point]
    changes = False

    def at(leaf: Any) -> Any:
        nonlocal changes
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.dtype == torch.bool:
            return leaf
        result = change(module, _drawn(leaf, draw, generator))
        changes = changes or not torch.equal(result, leaf)
        return result

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_bias = point == ZEROS and name.rpartition(".")[2].startswith("bias")
            drawn = _drawn(parameter.detach(), draw, generator)
            parameter.copy_(torch.zeros_like(parameter) if is_bias else coarse(drawn))
        inputs = pytree.tree_map(at, (args, kwargs))
    return Call(module, inputs) if changes else None


def coarse(tensor: torch.Tensor) -> torch.Tensor:
    """Multiples of the largest power of two within the spread; small negative numbers become -0.0."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    spread = float(tensor.std())
    if not 0 < spread < math.inf:
        return tensor
    unit = 2.0 ** math.floor(math.log2(spread))
    return (tensor / unit).round() * unit


def _drawn(tensor: torch.Tensor, draw: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    if not draw or not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return tensor + noise * _NOISE * tensor.std()


def _zeros(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(tensor.shape) if tensor.is_floating_point() else tensor


def _ties(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    return coarse(tensor)


def _equal_rows(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    return coarse(tensor)[:1].expand(tensor.shape).clone()


def _padding(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The second half of each row, and nearly all of the last row, hold zeros or the padding's number.

    A row of tokens has one, and its mask a 1.
    """
    import torch

    result = coarse(tensor).clone()
    if tensor.ndim < 2:
        return result
    tables = (part for part in module.modules() if isinstance(part, torch.nn.Embedding))
    numbers = [part.padding_idx for part in tables if part.padding_idx is not None]
    # A mask is 0 at padding, whatever the number of the token.
    is_mask = tensor.is_floating_point() or not tensor.numel() or int(tensor.max()) <= 1
    value = 0 if is_mask or not numbers else numbers[0]
    result[:, (tensor.shape[1] + 1) // 2 :] = value
    if tensor.shape[0] > 1:
        # With finfo.min at all places, PyTorch's fused attention (2.15, CPU) takes each of n weights for 1 in its
        # backward, and for 1/n in its forward.
        result[-1, 0 if tensor.is_floating_point() else 1 :] = value
    return result


ZEROS = "with inputs and biases of zero"
POINTS: dict[str, Point] = {
    ZEROS: _zeros,
    "with equal elements": _ties,
    "with equal rows": _equal_rows,
    "with padding": _padding,
}
"""What a message says of the point -> the inputs there."""
