"""What the optimizers share: the loop over parameter groups, Adam's moments, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortflow.torch.optim.multi_tensor import Options, Tensors
from ortflow.workflow.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments in torch.optim's state."""


class MultiTensorOptimizer(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]
    """An optimizer that updates all parameters of a group in one call."""

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns the result of `closure`, which computes the gradients if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                self.update_group(group, trained)
        return loss

    def update_group(self, group: dict[str, Any], trained: Sequence[torch.Tensor]) -> None:
        """Update the parameters of a group that have a gradient; there is at least one."""
        raise NotImplementedError

    def with_moments(self, trained: Sequence[torch.Tensor]) -> Tensors:
        """The parameters with gradients and both moments, of the form that torch.optim has; increments their steps."""
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in _MOMENTS:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in trained]
        firsts, seconds = ([state[name] for state in states] for name in _MOMENTS)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        numbers = [int(step) for step in torch.stack([step.cpu() for step in steps]).tolist()]
        return Tensors(list(trained), [p.grad for p in trained], firsts, seconds, numbers)


def move_moments(tensors: Tensors, gradients: list[torch.Tensor], options: Options) -> list[tuple[float, float]]:
    """Adam's moments after these gradients, in place; returns 1 - beta^step of both for each tensor, or ones."""
    torch._foreach_lerp_(tensors.firsts, gradients, 1 - options.beta_1)
    torch._foreach_mul_(tensors.seconds, options.beta_2)
    torch._foreach_addcmul_(tensors.seconds, gradients, gradients, 1 - options.beta_2)
    if not options.correct:
        return [(1.0, 1.0)] * len(tensors.steps)
    return [(1 - options.beta_1**step, 1 - options.beta_2**step) for step in tensors.steps]


def check_range(owner: str, **numbers: float | torch.Tensor) -> None:
    """Raises UserError for a negative number."""
    for name, value in numbers.items():
        if not float(value) >= 0:
            raise UserError(f"{name} is {float(value):g}", where=owner, fix="it must not be negative")


def check_fractions(owner: str, betas: tuple[float, float]) -> None:
    """Raises UserError unless both are in [0, 1)."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas is {betas!r}", where=owner, fix="use two numbers from 0 to below 1")
