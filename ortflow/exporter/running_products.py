"""Running products and logarithms of determinants, composed: PyTorch's exporter has no form of them.

Called by `ortflow.exporter.trace`, which puts them in place of PyTorch's while it traces a module.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class LogDeterminant(NamedTuple):
    """The fields of what `torch.linalg.slogdet` returns."""

    sign: Any
    logabsdet: Any


def running_product(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """`torch.cumprod`, in as many products as the length of the axis has binary digits.

    Products alone: the gradient is exact where elements are 0, as PyTorch's. An axis that varies takes memory by the
    square of its length.
    """
    import torch

    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0:
        return x.clone()
    length, step = x.shape[dim], 1
    if not isinstance(length, int):
        places, last = torch.arange(length, device=x.device), x.movedim(dim, -1).unsqueeze(-2)
        return torch.where(places[:, None] >= places, last, 1.0).prod(-1).movedim(-1, dim)
    while step < length:
        before = torch.ones_like(x.narrow(dim, 0, step))
        x = x * torch.cat([before, x.narrow(dim, 0, length - step)], dim)
        step *= 2
    return x


def log_determinant(x: Any) -> LogDeterminant:
    """`torch.linalg.slogdet`; rows are divided by their norms, so that the determinant does not overflow."""
    import torch

    norms = x.detach().norm(dim=-1, keepdim=True)
    norms = torch.where(norms > 0, norms, 1.0)
    determinant = torch.linalg.det(x / norms)
    return LogDeterminant(determinant.sign(), determinant.abs().log() + norms.squeeze(-1).log().sum(-1))
