"""Normalisations as PyTorch computes them in training, composed where its exporter loses their statistics.

Called by `ortflow.exporter.trace`. `InstanceNorm(track_running_stats=True)` and `BatchNorm(momentum=None)` move
buffers, which become state of the run; `F.batch_norm(training=False)` on tensors that are no module's statistics is
arithmetic, because a run switches BatchNormalization nodes to batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def instance_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of `torch.instance_norm`."""

    def replacement(
        x: Any,
        weight: Any,
        bias: Any,
        mean: Any,
        variance: Any,
        use_input: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
    ) -> Any:
        if mean is None:
            return original(x, weight, bias, mean, variance, use_input, momentum, eps, cudnn)
        if not use_input:
            return _by_statistics(x, weight, bias, mean, variance, eps)
        axes, data = tuple(range(2, x.ndim)), x.detach()
        # As in PyTorch: the mean over the samples of each sample's statistics.
        _move(mean, data.mean(axes).mean(0), momentum)
        _move(variance, data.var(axes, unbiased=True).mean(0), momentum)
        return original(x, weight, bias, None, None, True, momentum, eps, cudnn)

    return replacement


def batch_norm(original: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """A replacement of `torch.batch_norm` for a module that is traced."""
    import torch

    parts = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]

    def replacement(
        x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, *rest: Any
    ) -> Any:
        own_statistics = any(part.running_mean is mean for part in parts)
        if training or own_statistics or mean is None or not module.training:
            return original(x, weight, bias, mean, variance, training, momentum, *rest)
        return _by_statistics(x, weight, bias, mean, variance, rest[0])

    return replacement


def batch_norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of `torch.nn.BatchNorm1d.forward` and its kind: with `momentum=None` the mean over all batches."""

    def forward(self: Any, x: Any) -> Any:
        import torch

        if self.momentum is not None or not self.training or self.running_mean is None:
            return original(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(x.dtype)
        axes, data = (0, *range(2, x.ndim)), x.detach()
        _move(self.running_mean, data.mean(axes), share)
        _move(self.running_var, data.var(axes, unbiased=True), share)
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    return forward


def _move(statistic: Any, now: Any, share: Any) -> None:
    statistic.copy_(statistic * (1 - share) + now * share)


def _by_statistics(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float) -> Any:
    shape = (1, -1, *([1] * (x.ndim - 2)))
    result = (x - mean.reshape(shape)) / (variance.reshape(shape) + eps).sqrt()
    if weight is not None:
        result = result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)
