"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ortflow.torch.optim.base import MultiTensorOptimizer, check_range
from ortflow.torch.optim.multi_tensor import Options, Rule, Tensors, update
from ortflow.workflow.errors import UserError

_BUFFER = "momentum_buffer"


class SGD(MultiTensorOptimizer):
    """As torch.optim.SGD without dampening, with one call for all parameters of a group; see `FusedAdam`.

    Its state_dict has the form of torch.optim.SGD's.

    Parameters
    ----------
    params
        Parameters, or groups of them.
    lr, momentum, weight_decay, nesterov
        As in torch.optim.SGD.

    Raises
    ------
    UserError
        For a value outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_range("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and not momentum:
            raise UserError("nesterov needs momentum", where="SGD", fix="set momentum")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if group.get("dampening") or group.get("maximize"):
                raise UserError("a parameter group has `dampening` or `maximize`", where="SGD", fix="use torch.optim")

    def update_group(self, group: dict[str, Any], trained: Sequence[torch.Tensor]) -> None:
        """See the base class."""
        buffers = []
        for parameter in trained if group["momentum"] else ():
            state = self.state[parameter]
            if state.get(_BUFFER) is None:
                state[_BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            buffers.append(state[_BUFFER])
        tensors = Tensors(list(trained), [p.grad for p in trained], buffers, [], [0] * len(trained))
        numbers = float(group["lr"]), group["momentum"], 0.0, 0.0, group["weight_decay"]
        update(Rule.SGD, tensors, Options(*numbers, int(group["nesterov"])), _by_torch)


def _by_torch(tensors: Tensors, options: Options) -> None:
    """The same in PyTorch's multi-tensor operators."""
    g = tensors.gradients
    if options.decay:
        g = list(torch._foreach_add(g, tensors.parameters, alpha=options.decay))
    if tensors.firsts:
        torch._foreach_mul_(tensors.firsts, options.beta_1)
        torch._foreach_add_(tensors.firsts, g)
        g = list(torch._foreach_add(g, tensors.firsts, alpha=options.beta_1)) if options.mode else tensors.firsts
    torch._foreach_add_(tensors.parameters, g, alpha=-options.rate)
