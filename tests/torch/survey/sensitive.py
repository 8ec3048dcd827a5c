"""Models that are sensitive to half precision: squared norms, long sums, positions, hard gates, neighbours' maxima."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Capsules(nn.Module):
    """A capsule network (Sabour et al., 2017): squashed vectors and two rounds of routing by agreement."""

    def __init__(self, classes: int, rounds: int = 2) -> None:
        super().__init__()
        self.first, self.primary = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 32, 5, stride=2, padding=2)
        self.votes, self.rounds = nn.Parameter(0.1 * torch.randn(256, classes, 8, 8)), rounds

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = self.primary(torch.relu(self.first(x))).flatten(2).transpose(1, 2).reshape(len(x), 256, 8)
        votes = torch.einsum("bni,ncij->bncj", self.squash(u), self.votes)
        agreement = torch.zeros_like(votes[..., 0])
        for _ in range(self.rounds):
            capsules = self.squash((agreement.softmax(2).unsqueeze(-1) * votes).sum(1))
            agreement = agreement + (votes * capsules.unsqueeze(1)).sum(-1)
        return (capsules.square().sum(-1) + 1e-8).sqrt()


class Separator(nn.Module):
    """Conv-TasNet (Luo and Mesgarani, 2019) in small: encoder, dilated blocks with global norms, mask, decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, width, 8, stride=4), nn.ConvTranspose1d(width, 1, 8, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 32, 1), nn.PReLU(), nn.GroupNorm(1, 32),
                nn.Conv1d(32, 32, 3, dilation=2**n, padding=2**n, groups=32), nn.PReLU(), nn.GroupNorm(1, 32),
                nn.Conv1d(32, width, 1),
            )
            for n in range(3)
        )  # fmt: skip
        self.mask = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixture = torch.relu(self.encoder(x.flatten(1).unsqueeze(1)))
        hidden = mixture
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.decoder(mixture * torch.sigmoid(self.mask(hidden))).flatten(1)


class SpatialTransformer(nn.Module):
    """A spatial transformer (Jaderberg et al., 2015): a learned affine grid, sampled with reflection."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6))
        nn.init.normal_(self.locate[-1].weight, std=0.01)
        self.locate[-1].bias.data = torch.tensor([1.0, 0, 0, 0, 1.0, 0])
        self.read = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        seen = functional.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
        return self.head(self.read(seen))


class HardGates(nn.Module):
    """HardSwish, HardSigmoid and ReLU6, as mobile networks use them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Hardswish(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6()
        )
        self.gate, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return self.head((h * functional.hardsigmoid(self.gate(h.mean((2, 3), keepdim=True)))).mean((2, 3)))


class Neighbours(nn.Module):
    """A graph network that takes the largest and the smallest of its neighbours' messages (scatter_reduce)."""

    def __init__(self, width: int, classes: int, nodes: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("edges", torch.randint(0, nodes, (2, 40), generator=generator))
        self.message, self.head = nn.Linear(width, 16), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        messages = self.message(x)[:, self.edges[0]]
        to = self.edges[1].view(1, -1, 1).expand(len(x), -1, 16)
        empty = torch.zeros(len(x), x.shape[1], 16, dtype=messages.dtype, device=x.device)
        most = empty.scatter_reduce(1, to, messages, "amax", include_self=False)
        least = empty.scatter_reduce(1, to, messages, "amin", include_self=False)
        return self.head(torch.cat([most, least], -1).mean(1))
