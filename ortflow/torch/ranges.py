"""The numbers that the arguments of a call may have: labels, and indices of tables. Called by `tracing`.

Eager PyTorch raises for others. ONNX counts a negative index from the end, and a cross-entropy of a label that is no
class is a number. Checked are arguments that reach such an operator with no more than changes of shape, and on a CPU:
a check on a GPU would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.origin import user_line

_SHAPES = frozenset([
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "t", "flatten", "contiguous",
    "clone", "alias", "detach", "expand",
])  # fmt: skip
"""Operators whose result has the values of their input."""
_PARTS = frozenset(["slice", "select", "constant_pad_nd"])
"""Operators whose result has other values."""
_CAST = "_to_copy"
_LOSSES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward"])
_IGNORED = -100
Cut = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Range:
    """What one operator allows."""

    place: int
    """Of the tensor among those of the call."""
    cuts: tuple[Cut, ...]
    """What is done to it before."""
    size: int
    """0 to size - 1 are allowed."""
    ignored: int | None
    """A label that is allowed besides."""
    what: str

    def check(self, tensor: torch.Tensor) -> None:
        """Raise UserError if a number is out of range."""
        if tensor.device.type != "cpu":
            return
        for function, args in self.cuts:
            tensor = function(tensor, *args)
        worst = self._worst(tensor)
        if worst is not None and self.ignored is not None:
            worst = self._worst(tensor[tensor != self.ignored])
        if worst is not None:
            also = "" if self.ignored is None else f", or {self.ignored}, which is ignored"
            raise UserError(f"{self.what} is {worst}, which is out of range", fix=f"give 0 to {self.size - 1}{also}")

    def _worst(self, tensor: torch.Tensor) -> int | None:
        if not tensor.numel():
            return None
        lowest, highest = (int(bound) for bound in torch.aminmax(tensor.detach()))
        return lowest if lowest < 0 else highest if highest >= self.size else None


def ranges_of(program: Any) -> tuple[Range, ...]:
    """Those of a torch.export.ExportedProgram."""
    names = list(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    ranges = [
        index_range
        for node in inputs
        if _is_integer(node)
        for index_range in _uses(node, names.index(node.name), (), ())
    ]
    return tuple(dict.fromkeys(ranges))


def _uses(node: Any, place: int, cuts: tuple[Cut, ...], shapes: tuple[Cut, ...] | None) -> Iterator[Range]:
    """The ranges of a tensor's readers.

    `shapes`: changes of shape since the last cut; None if one of them is not constant.
    """
    for user in node.users:
        name = _name(user)
        if user.args and user.args[0] is node and _is_integer(user):
            step = _constant(user)
            if name == _CAST:
                yield from _uses(user, place, cuts, shapes)
            elif name in _SHAPES:
                yield from _uses(user, place, cuts, None if shapes is None or step is None else (*shapes, step))
            elif name in _PARTS and shapes is not None and step is not None:
                yield from _uses(user, place, (*cuts, *shapes, step), ())
        size, ignored, noun = _allowed(user, node, name)
        if isinstance(size, int):
            line = user_line(str(user.meta.get("stack_trace", "")))
            yield Range(place, cuts, size, ignored, noun + (" at {} line {}".format(*line) if line else ""))


def _allowed(user: Any, node: Any, name: str) -> tuple[Any, int | None, str]:
    """How many numbers an operator allows for `node`, what it ignores, and what a message calls it."""
    args = user.args
    if name == "embedding" and args[1] is node:
        return _shape(args[0])[0], None, "an index of a table"
    if name == "gather" and args[2] is node:
        shape = _shape(args[0])
        return (shape[args[1]] if shape else 1), None, "an index"
    if name in _LOSSES and args[1] is node:
        shape = _shape(args[0])
        names = [argument.name for argument in user.target._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **user.kwargs}
        return shape[0 if len(shape) == 1 else 1], int(arguments.get("ignore_index", _IGNORED)), "a label"
    return None, None, ""


def _name(node: Any) -> str:
    domain, name, overload = (*str(node.target).split("."), "", "")[:3]
    return name if domain == "aten" and overload != "dtype" else ""


def _shape(node: Any) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def _is_integer(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _constant(node: Any) -> Cut | None:
    """An operator and its further arguments; None if one of these is computed."""
    flat = torch.utils._pytree.tree_leaves([node.args[1:], node.kwargs])
    if node.kwargs or any(not isinstance(argument, (int, float, bool, type(None))) for argument in flat):
        return None
    return node.target, tuple(node.args[1:])
