"""LAMB (You et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ortflow.torch.optim.base import MultiTensorOptimizer, check_fractions, check_range, move_moments
from ortflow.torch.optim.multi_tensor import Options, Rule, Tensors, update


class Lamb(MultiTensorOptimizer):
    """Adam's change plus weight decay, scaled by the norm of each parameter over that of its change.

    The update rule is that of `train.optimizer: {name: lamb}` in a run file. See `FusedAdam` for where it runs.

    Parameters
    ----------
    params
        Parameters, or groups of them.
    lr, betas, eps, weight_decay
        As in torch.optim.AdamW.

    Raises
    ------
    UserError
        For a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        check_range("Lamb", lr=lr, eps=eps, weight_decay=weight_decay)
        check_fractions("Lamb", betas=betas)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update_group(self, group: dict[str, Any], trained: Sequence[torch.Tensor]) -> None:
        """See the base class."""
        numbers = float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]
        update(Rule.LAMB, self.with_moments(trained), Options(*numbers), _by_torch)


def _by_torch(tensors: Tensors, options: Options) -> None:
    """The same in PyTorch's multi-tensor operators."""
    w = tensors.parameters
    biases = move_moments(tensors, tensors.gradients, options)
    roots = list(torch._foreach_sqrt(tensors.seconds))
    torch._foreach_div_(roots, [second**0.5 for _, second in biases])
    torch._foreach_add_(roots, options.epsilon)
    changes = list(torch._foreach_div(tensors.firsts, roots))
    torch._foreach_div_(changes, [first for first, _ in biases])
    torch._foreach_add_(changes, w, alpha=options.decay)
    norms = zip(torch._foreach_norm(w), torch._foreach_norm(changes), strict=True)
    ratios = [torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a)) for a, b in norms]
    torch._foreach_mul_(changes, ratios)
    torch._foreach_add_(w, changes, alpha=-options.rate)
