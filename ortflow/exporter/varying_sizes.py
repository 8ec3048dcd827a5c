"""Operators whose number may be a size that varies: PyTorch's exporter takes only constants there.

Called by `ortflow.exporter.trace`, which puts them in place of PyTorch's while it traces a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def by_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """`remainder` or `pow` of a tensor and a number; a size that varies becomes a tensor."""

    def replacement(*args: Any, **options: Any) -> Any:
        import torch

        if len(args) == 2 and isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.SymInt):
            return original(args[0], torch.full((), args[1], dtype=args[0].dtype, device=args[0].device), **options)
        return original(*args, **options)

    return replacement


def roll(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.roll`; by a size that varies along one axis, it is a choice of elements."""

    def replacement(input: Any, shifts: Any, dims: Any = None) -> Any:
        import torch

        shift = shifts[0] if isinstance(shifts, (tuple, list)) and len(shifts) == 1 else shifts
        axis = dims[0] if isinstance(dims, (tuple, list)) and len(dims) == 1 else dims
        if not isinstance(shift, torch.SymInt) or not isinstance(axis, int):
            return original(input, shifts) if dims is None else original(input, shifts, dims)
        count = input.shape[axis]
        places = torch.arange(count, device=input.device) - torch.full((), shift, device=input.device)
        return input.index_select(axis, torch.remainder(places, torch.full((), count, device=input.device)))

    return replacement
