"""Trains a small transformer in each composition with ORTModule and without, on two ranks; prints the differences.

Arguments: names of compositions. Prints `name loss-difference parameter-difference` on rank 0, as fractions of the
largest value.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ortflow.torch import ORTModule

STEPS, WIDTH, BLOCKS = 20, 16, 3


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_three, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.further = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_three(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.further(x)


class Model(nn.Module):
    """Blocks; `spare` is read in some calls only, and `checkpointed` computes the blocks again."""

    def __init__(self, spare: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, further: bool = False) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        if further and self.spare is not None:
            h = h + self.spare(h)
        return self.head(h)


Wrap = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], nn.Module]


def ddp(**options: object) -> Wrap:
    """DDP around the whole."""
    return lambda model, ort: DistributedDataParallel(ort(model), **options)  # type: ignore[arg-type]


def sharded(model: nn.Module, ort: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """FSDP2 around the whole."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(ort(model))


def sharded_blocks(model: nn.Module, ort: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """FSDP2 of each block, which frees its parameters between the passes."""
    from torch.distributed.fsdp import fully_shard

    for place, block in enumerate(model.blocks):
        model.blocks[place] = fully_shard(ort(block), reshard_after_forward=True)
    return fully_shard(model)


def checkpointed(model: nn.Module, ort: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """DDP of a model whose blocks are computed again in the backward pass."""
    for place, block in enumerate(model.blocks):
        model.blocks[place] = ort(block)
    return DistributedDataParallel(model)


COMPOSITIONS: dict[str, Wrap] = {
    "ddp": ddp(),
    "static": ddp(static_graph=True),
    "unused": ddp(find_unused_parameters=True),
    "views": ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.005),
    "no_sync": ddp(),
    "fsdp2": sharded,
    "fsdp2-blocks": sharded_blocks,
    "checkpointed": checkpointed,
}


def trained(name: str, ort: Callable[[nn.Module], nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of 20 steps, and all parameters after them."""
    torch.manual_seed(1)
    model = COMPOSITIONS[name](Model(name == "unused", name == "checkpointed"), ort)
    # Adam would make steps of the rounding in gradients that are 0, such as those of the biases of keys.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    generator = torch.Generator().manual_seed(10 + distributed.get_rank())
    for step in range(STEPS):
        parts = 2 if name == "no_sync" else 1
        optimizer.zero_grad()
        for part in range(parts):
            x = torch.randn(3 + step % 2, 6, 8, generator=generator)
            waits = model.no_sync() if part < parts - 1 else contextlib.nullcontext()
            with waits:
                arguments = (step % 3 == 1,) if name == "unused" else ()
                loss = (model(x, *arguments) - x.sum(-1, keepdim=True)).square().mean()
                loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([whole(p).flatten() for p in model.parameters()])


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All elements of a parameter, sharded or not."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((a - b).abs().max() / b.abs().max()) if a.numel() else 0.0


def main() -> None:
    """Compare."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for name in sys.argv[1:] or COMPOSITIONS:
        losses, parameters = trained(name, ORTModule)
        expected, others = trained(name, lambda module: module)
        found = difference(losses, expected), difference(parameters, others)
        everyone: list[tuple[float, float]] = [(0.0, 0.0)] * distributed.get_world_size()
        distributed.all_gather_object(everyone, found)
        if distributed.get_rank() == 0:
            print(name, *(f"{max(values):.1e}" for values in zip(*everyone, strict=True)), flush=True)
    distributed.destroy_process_group()
    sys.stdout.flush()
    # Gloo's threads abort some processes at the interpreter's end.
    os._exit(0)


if __name__ == "__main__":
    main()
