"""PyTorch's own run of a case: the curve that every export must follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from case import Case

from ortflow.workflow.spec.optimizers import Adam

STEPS = 20
OPTIMIZER = Adam(name="adamw", lr=1e-3, weight_decay=0.05)


@dataclass(frozen=True)
class Curve:
    """The loss before each step, and the final state: norms of parameters, running statistics."""

    losses: list[float]
    norms: dict[str, float]
    statistics: dict[str, torch.Tensor]


def torch_curve(case: Case) -> Curve:
    """Train with torch.optim.AdamW, with weight decay for tensors of more than one axis, as ortflow does."""
    module = case.module()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.epsilon,
    )
    losses = []
    for batch in case.batches(STEPS):
        optimizer.zero_grad()
        loss = case.torch_loss(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    norms = {name: parameter.norm().item() for name, parameter in module.named_parameters()}
    statistics = {name: buffer for name, buffer in module.named_buffers() if "running_" in name}
    return Curve(losses, norms, statistics)


def torch_gradients(case: Case) -> dict[str, torch.Tensor]:
    """Gradients of the first batch's loss, by name."""
    module = case.module()
    case.torch_loss(module, next(case.batches(1))).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
