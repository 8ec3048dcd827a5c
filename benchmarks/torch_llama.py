"""The Llama of llama.py in PyTorch under FSDP2, with the same weights, as its users would train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from llama import EPSILON, Sizes, rotary
from step import CLIP, DECAY, RATE
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Arrays = Mapping[str, npt.NDArray[np.float32]]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, shared = sizes.width, sizes.groups * sizes.head
        self.head = sizes.head
        self.ln_1, self.ln_2 = nn.RMSNorm(width, eps=EPSILON), nn.RMSNorm(width, eps=EPSILON)
        self.q, self.k, self.v, self.o = (_linear(width, size) for size in (width, shared, shared, width))
        self.gate, self.up, self.down = (
            _linear(width, sizes.inner),
            _linear(width, sizes.inner),
            _linear(sizes.inner, width),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normal = self.ln_1(x)
        q, k, v = (part(normal).view(*x.shape[:2], -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        normal = self.ln_2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Llama(nn.Module):
    """Tokens and labels to the mean cross-entropy. `again`: blocks are recomputed in the backward pass."""

    def __init__(self, sizes: Sizes, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width, eps=EPSILON), _linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.again else block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def stepper(
    sizes: Sizes, weights: Arrays, device: torch.device, *, compiled: bool, again: bool, half: bool
) -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], float]:
    """One training step: forward, backward, clip, fused AdamW; parameters sharded, and resharded behind each block."""
    with torch.device("meta"):
        model = Llama(sizes, again=again)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    for block in model.layers:
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = torch.from_numpy(weights[name]).chunk(ranks)
            parameter.to_local().copy_(parts[rank])
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    kind = torch.bfloat16 if half else torch.float32
    angles = [torch.from_numpy(each).to(device, kind) for each in rotary(sizes)]

    def step(tokens: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> float:
        loss = model(*(torch.from_numpy(each).to(device, non_blocking=True) for each in (tokens, labels)), *angles)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
