"""Adam and AdamW."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from ortflow.torch.optim.base import MultiTensorOptimizer, check_fractions, check_range, move_moments
from ortflow.torch.optim.multi_tensor import Options, Rule, Tensors, update
from ortflow.workflow.errors import UserError


class AdamWMode(enum.IntEnum):
    """How weight decay acts."""

    ADAM_L2_REGULARIZATION = 0
    """It is added to the gradient, as in torch.optim.Adam."""
    ADAMW_TRANSFORMERS = 1
    """It is applied after the step, and epsilon is added before bias correction, as in transformers' AdamW."""
    ADAMW_TORCH = 2
    """It is applied before the step, as in torch.optim.AdamW."""


class FusedAdam(MultiTensorOptimizer):
    """Adam with one call for all parameters of a group. Its state_dict has the form of torch.optim.AdamW's.

    Tensors of fp32 in the CPU's memory are updated by ortflow's library, on `torch.get_num_threads()` threads; others,
    such as those on GPUs, by PyTorch's multi-tensor operators.

    Parameters
    ----------
    params
        Parameters, or groups of them.
    lr, betas, eps, weight_decay
        As in torch.optim.AdamW.
    bias_correction
        Divide the moments by 1 - beta^step.
    adam_w_mode
        An `AdamWMode`.
    set_grad_none
        Whether `zero_grad()` sets gradients to None.

    Raises
    ------
    UserError
        For a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        class_name = "FusedAdam"
        if adam_w_mode not in list(AdamWMode):
            raise UserError(f"adam_w_mode is {adam_w_mode!r}", where=class_name, fix="use an AdamWMode")
        check_range(class_name, lr=lr, eps=eps, weight_decay=weight_decay)
        check_fractions(class_name, betas=betas)
        self.adam_w_mode, self.set_grad_none = AdamWMode(adam_w_mode), set_grad_none
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)
            if group.get("amsgrad") or group.get("maximize"):
                raise UserError(
                    "a parameter group has `amsgrad` or `maximize`", where="FusedAdam", fix="use torch.optim"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zeros if both `set_grad_none` and `set_to_none` are False."""
        super().zero_grad(set_to_none=self.set_grad_none or set_to_none)

    def update_group(self, group: dict[str, Any], trained: Sequence[torch.Tensor]) -> None:
        """See the base class."""
        rate, (beta_1, beta_2) = float(group["lr"]), group["betas"]
        numbers = rate, beta_1, beta_2, group["eps"], group["weight_decay"]
        options = Options(*numbers, int(self.adam_w_mode), bool(group["bias_correction"]))
        update(Rule.ADAM, self.with_moments(trained), options, _by_torch)


def _by_torch(tensors: Tensors, options: Options) -> None:
    """The same in PyTorch's multi-tensor operators."""
    w, g, mode = tensors.parameters, tensors.gradients, options.mode
    if mode == AdamWMode.ADAM_L2_REGULARIZATION and options.decay:
        g = list(torch._foreach_add(g, w, alpha=options.decay))
    if mode == AdamWMode.ADAMW_TORCH:
        torch._foreach_mul_(w, 1 - options.rate * options.decay)
    biases = move_moments(tensors, g, options)
    late = mode == AdamWMode.ADAMW_TRANSFORMERS
    roots = list(torch._foreach_sqrt(tensors.seconds))
    if not late:
        torch._foreach_div_(roots, [second**0.5 for _, second in biases])
    torch._foreach_add_(roots, options.epsilon)
    scales = [-options.rate / first * (second**0.5 if late else 1) for first, second in biases]
    torch._foreach_addcdiv_(w, tensors.firsts, roots, scales)
    if late:
        torch._foreach_mul_(w, 1 - options.rate * options.decay)
