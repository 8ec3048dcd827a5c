"""Arguments and results of `forward` as flat lists of tensors, and what must be equal for two calls to share a graph.

Called by `engine`. Containers are PyTorch's pytrees; a dataclass is registered as one when it is first met.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortflow.workflow.errors import UserError

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout,
              torch.memory_format, slice, range, type(...))  # fmt: skip
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
"""Element types of tensors that a graph takes."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A container as a flat list of leaves."""

    tensors: tuple[torch.Tensor, ...]
    constants: tuple[tuple[int, Any], ...]
    """Place among the leaves, and value."""
    spec: pytree.TreeSpec

    def without_tensors(self) -> Flat:
        """The container without its tensors, which may be kept."""
        return Flat((), self.constants, self.spec)

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """The container with other tensors in their places."""
        return rebuilt(tensors, self.constants, self.spec)


def rebuilt(tensors: Sequence[Any], constants: Sequence[tuple[int, Any]], spec: pytree.TreeSpec) -> Any:
    """The container of these leaves."""
    leaves = list(tensors)
    for place, value in constants:
        leaves.insert(place, value)
    return pytree.tree_unflatten(leaves, spec)


def flat(value: Any, whose: str, dtypes: Collection[torch.dtype] = DTYPES) -> Flat:
    """Flatten a container. Raises UserError, beginning with `whose`, for a leaf that no graph can have.

    `dtypes`: the element types that tensors may have.
    """
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if unknown:
        for kind in unknown:
            _register(kind, whose)
        return flat(value, whose, dtypes)
    tensors, constants = [], []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(_checked(leaf, whose, dtypes))
        elif isinstance(leaf, _CONSTANTS):
            constants.append((place, leaf))
        else:
            raise UserError(
                f"{whose} contains a {type(leaf).__module__}.{type(leaf).__qualname__}, and a graph takes tensors,"
                " numbers, strings and None, in lists, tuples, dicts and dataclasses",
                fix=_fix(leaf),
            )
    return Flat(tuple(tensors), tuple(constants), spec)


def _register(kind: type, whose: str) -> None:
    try:
        torch.export.register_dataclass(kind)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{whose} contains a {kind.__qualname__}, a dataclass that PyTorch cannot take apart ({error})"
        ) from error


def _fix(leaf: Any) -> str:
    name = type(leaf).__name__
    if name == "ndarray":
        return "convert it with torch.from_numpy"
    if "Cache" in name:
        return "call with use_cache=False"
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "return tensors: the number depends on the sizes of the inputs"
    return "give its tensors as arguments of their own"


def _checked(tensor: torch.Tensor, whose: str, dtypes: Collection[torch.dtype]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{whose} contains a {kind} tensor, and a graph takes dense ones", fix="call its to_dense()")
    if tensor.dtype not in dtypes:
        raise UserError(
            f"{whose} contains a tensor of {str(tensor.dtype).removeprefix('torch.')}, and graphs compute in float32",
            fix="convert it with float()",
        )
    return tensor


def described(tensor: torch.Tensor) -> Hashable:
    """What a graph depends on: sizes of 0 and 1 broadcast, so that a graph for other sizes does not fit them."""
    sizes = tuple(size if size < 2 else -1 for size in tensor.shape)
    return tensor.dtype, tensor.device, tensor.requires_grad, sizes


def constants_key(flat_value: Flat) -> Hashable:
    """Constants by value and type: True is not 1."""
    return tuple((place, type(value), _hashable(value)) for place, value in flat_value.constants)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, (slice, range)):
        return value.start, value.stop, value.step
    if isinstance(value, float):
        return repr(value)  # NaN equals itself, and -0.0 is not 0.0
    return value  # type: ignore[no-any-return]
