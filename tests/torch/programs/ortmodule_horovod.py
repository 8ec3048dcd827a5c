"""Trains with ORTModule in Horovod's DistributedOptimizer and without ORTModule, on two ranks.

Prints `difference horovod of-losses of-parameters distance` on rank 0, as fractions of the largest value: the last is
how far the parameters have moved.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn

from ortflow.torch import ORTModule

STEPS, BATCH = 10, 8


def trained(*, graphs: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, and parameters before and after the steps."""
    torch.manual_seed(1 + hvd.rank())  # another model on rank 1, before the broadcast
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    if graphs:
        model = ORTModule(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first, losses = flat(model), []
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step)).chunk(2)[hvd.rank()]
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), first, flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one tensor."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference on any rank, of the largest value."""
    return float(hvd.allreduce((a - b).abs().max() / b.abs().max(), op=hvd.Max))


torch.set_num_threads(1)
hvd.init()
losses, _, last = trained(graphs=True)
expected, first, other = trained(graphs=False)
found = difference(losses, expected), difference(last, other), difference(other, first)
if hvd.rank() == 0:
    print("difference horovod", *(f"{each:.1e}" for each in found), flush=True)
