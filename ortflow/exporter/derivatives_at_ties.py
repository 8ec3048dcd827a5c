"""Functions whose exported form has another derivative than PyTorch's at zero or between equal elements, composed anew.

Called by `ortflow.exporter.trace`, which puts them in place of PyTorch's while it traces a module. Each takes the
original function and returns its replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def adaptive_max_pool(axes: int) -> Callable[[Function], Function]:
    """Of one element for each channel: the exporter writes amax, whose gradient equal elements share."""

    def of(original: Function) -> Function:
        def pool(x: Any, output_size: Any) -> Any:
            sizes = [output_size] * axes if isinstance(output_size, int) else list(output_size)
            if sizes != [1] * axes:
                return original(x, output_size)
            largest = x.flatten(-axes).max(-1)
            shape = [*x.shape[:-axes], *[1] * axes]
            return largest.values.reshape(shape), largest.indices.reshape(shape)

        return pool

    return of


def angle(original: Function) -> Function:
    """`torch.angle`; the translation of the angle of complex numbers has no gradient at 0."""

    def replacement(x: Any, *rest: Any, **options: Any) -> Any:
        import torch

        return torch.atan2(x.imag, x.real) if torch.is_complex(x) else original(x, *rest, **options)

    return replacement


def clamp(original: Function) -> Function:
    """`torch.clamp`; where two bounds are tensors and equal, only one of the three has a gradient in PyTorch."""

    def replacement(input: Any, min: Any = None, max: Any = None, **options: Any) -> Any:
        import torch

        min, max = _of_one_type(min, max)
        if not (isinstance(min, torch.Tensor) and isinstance(max, torch.Tensor) and input.is_floating_point()):
            return original(input, min, max, **options)
        between = torch.minimum(torch.maximum(input, min), max)
        return torch.where(min == max, torch.where(input < min, min, torch.where(input > max, max, input)), between)

    return replacement


def clamp_in_place(original: Function) -> Function:
    """`Tensor.clamp_`, whose bounds may be an integer and a number."""

    def replacement(input: Any, min: Any = None, max: Any = None) -> Any:
        return original(input, *_of_one_type(min, max))

    return replacement


def _of_one_type(low: Any, high: Any) -> tuple[Any, Any]:
    # PyTorch 2.15 cannot export bounds of two types.
    return (float(low), float(high)) if {type(low), type(high)} == {int, float} else (low, high)


def deviation(variance: Function) -> Function:
    """The standard deviation by a function that computes the variance; the gradient at 0 is 0, as PyTorch's."""

    def std(*args: Any, **kwargs: Any) -> Any:
        return _root(variance(*args, **kwargs))

    return std


def deviation_and_mean(variance_and_mean: Function) -> Function:
    """`torch.std_mean` by `torch.var_mean`, likewise."""

    def std_mean(*args: Any, **kwargs: Any) -> Any:
        variance, mean = variance_and_mean(*args, **kwargs)
        return _root(variance), mean

    return std_mean


def distances(original: Function) -> Function:
    """`torch.cdist`, composed; the gradient at a distance of 0 is 0, as PyTorch's."""

    def cdist(first: Any, second: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
        if p == 0 or math.isinf(p):
            return original(first, second, p) if compute_mode is None else original(first, second, p, compute_mode)
        steps = first.unsqueeze(-2) - second.unsqueeze(-3)
        return _root(steps.pow(2).sum(-1)) if p == 2 else steps.norm(p=p, dim=-1)

    return cdist


def gaussian_nll_loss(original: Function) -> Function:
    """Without the check of the variance's sign, a branch on values."""

    def loss(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Any:
        import torch

        if not isinstance(var, torch.Tensor):
            return original(input, target, var, full, eps, reduction)
        if var.shape != input.shape and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        # The gradient passes the limit, as in PyTorch.
        limited = var + (var.clamp(min=eps) - var).detach()
        losses = 0.5 * (limited.log() + (input - target) ** 2 / limited)
        losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
        return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses

    return loss


def scatter_reduce(original: Function) -> Function:
    """Means, which ONNX does not have, and extremes without the tensor's own values.

    PyTorch counts an own value that equals the extreme among those that share its gradient, although it is left out.
    """

    active = False

    def reduced(self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
        import torch

        from ortflow.exporter.stops import keeps_stops, stopped

        nonlocal active
        if active:
            return original(self, dim, index, src, reduce, include_self=include_self)
        if reduce == "mean":
            base = self if include_self else self.scatter(dim, index, 0.0)
            counts = (torch.ones_like if include_self else torch.zeros_like)(self)
            counts = counts.scatter_add(dim, index, torch.ones_like(src)).clamp(min=1.0)
            return base.scatter_add(dim, index, src) / counts
        # PyTorch's exporter looks the method up again while it runs.
        active = True
        try:
            result = original(self, dim, index, src, reduce, include_self=include_self)
        finally:
            active = False
        if reduce not in ("amax", "amin") or include_self or src.shape != index.shape or not keeps_stops():
            return result
        fixed = stopped(result)
        sharing = (src.detach() == fixed.gather(dim, index)).to(fixed.dtype)
        count = torch.zeros_like(fixed).scatter_add(dim, index, sharing)
        count_of_equals = count + (self.detach() == fixed).to(fixed.dtype)
        # Without any value, the own one stays, with its gradient.
        share = torch.where(count > 0, count / count_of_equals.clamp(min=1.0), 1.0)
        return fixed + (result - fixed) * share

    return reduced


def _root(squares: Any) -> Any:
    """The square root, with a gradient of 0 at 0."""
    import torch

    # The derivative of sqrt at 0 is infinite, and 0 times that is NaN: the root must not see the 0.
    spread = squares != 0
    return torch.where(spread, squares, 1.0).sqrt() * spread.to(squares.dtype)
