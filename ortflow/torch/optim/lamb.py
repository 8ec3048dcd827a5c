"""LAMB (You et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ortflow.torch.optim.fused_adam import bias, check_fractions, check_range, run
from ortflow.torch.optim.multi_tensor import Options, Rule, Tensors, moments, next_steps, update

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]
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

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns the result of `closure`, which computes the gradients if given."""
        loss = run(closure)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            for parameter in trained:
                moments(self.state[parameter], parameter, _MOMENTS)
            states = [self.state[p] for p in trained]
            firsts, seconds = ([state[name] for state in states] for name in _MOMENTS)
            tensors = Tensors(trained, [p.grad for p in trained], firsts, seconds, next_steps(states))
            numbers = float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]
            update(Rule.LAMB, tensors, Options(*numbers), _by_torch)
        return loss


def _by_torch(tensors: Tensors, options: Options) -> None:
    """The same in PyTorch's multi-tensor operators."""
    w, g = tensors.parameters, tensors.gradients
    torch._foreach_lerp_(tensors.firsts, g, 1 - options.beta_1)
    torch._foreach_mul_(tensors.seconds, options.beta_2)
    torch._foreach_addcmul_(tensors.seconds, g, g, 1 - options.beta_2)
    biases = [bias(options, step) for step in tensors.steps]
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
