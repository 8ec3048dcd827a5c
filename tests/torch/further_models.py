"""Networks that upsample images, attend by einsum, look up bags, and model densities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from case import Batch, Case
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from ortflow.workflow.spec.model import BinaryCrossEntropy, CrossEntropy, OutputLoss, Regression

SIDE, CLASSES, VOCABULARY, TIME, POINTS = 16, 5, 23, 8, 6
PIXELS = CrossEntropy(kind="cross_entropy", class_axis=1)
MSE = Regression(kind="mse")
OWN = OutputLoss(kind="output", output="loss")


class Results(NamedTuple):
    """The output of a module that computes its loss itself."""

    loss: torch.Tensor
    logits: torch.Tensor


def _block(into: int, out: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1, bias=False), norm(out), nn.SiLU())


class UNet(nn.Module):
    """Two levels; `up` is the upsampling."""

    def __init__(self, norm: Callable[[int], nn.Module], up: nn.Module) -> None:
        super().__init__()
        self.first, self.second = _block(3, 8, norm), _block(8, 16, norm)
        self.up, self.last = up, _block(24, 8, norm)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        fine = self.first(input)
        coarse = self.up(self.second(F.max_pool2d(fine, 2)))
        return self.head(self.last(torch.cat([fine, coarse], 1)))


def unet_transposed() -> nn.Module:
    """Upsampling by a transposed convolution."""
    return UNet(nn.BatchNorm2d, nn.ConvTranspose2d(16, 16, 2, stride=2))


def unet_resized() -> nn.Module:
    """Upsampling by linear interpolation."""
    return UNet(lambda channels: nn.GroupNorm(4, channels), nn.Upsample(scale_factor=2, mode="bilinear"))


class Detector(nn.Module):
    """Two levels of features, the coarse one added to the fine one, each with a head for classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 2, 1)
        self.lateral, self.norm = nn.Conv2d(12, 12, 1), nn.GroupNorm(3, 12)
        self.classes, self.boxes = nn.Conv2d(12, 3, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        fine = F.hardswish(self.stem(input))
        coarse = F.hardswish(self.down(fine))
        fine = self.lateral(fine) + F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        found = []
        for place, level in enumerate((fine, coarse)):
            level = torch.relu(self.norm(level))
            boxes = F.softplus(self.boxes(level) * self.scale[place])
            found.append(torch.cat([self.classes(level).sigmoid(), boxes], 1).flatten(2))
        return torch.cat(found, 2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of tokens to each other, all products by einsum, with a bias for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.project = nn.Parameter(torch.randn(3, 16, 4, 4) / 4)
        self.bias = nn.Parameter(torch.randn(4, 2 * TIME) / 4)
        self.join, self.head = nn.Parameter(torch.randn(4, 4, 16) / 4), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.einsum("btd,sdhe->sbthe", self.embed(tokens), self.project)
        places = torch.arange(TIME)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / 2 + self.bias[:, places[:, None] - places + TIME]
        return self.head(torch.einsum("bhts,bshe,hed->btd", scores.softmax(-1), v, self.join))


class Tagger(nn.Module):
    """Embedding, a bidirectional recurrent layer, a class for every token."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.recurrent = layer(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


def bidirectional_lstm() -> nn.Module:
    """Two layers of LSTM in both directions."""
    return Tagger(nn.LSTM)


def bidirectional_gru() -> nn.Module:
    """Two layers of GRU in both directions."""
    return Tagger(nn.GRU)


class Recommender(nn.Module):
    """Bags of items and dense features, each pair of their vectors multiplied (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 6, mode=mode) for mode in ("sum", "mean"))
        self.bottom, self.top = nn.Linear(POINTS, 6), nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(dense), *(bag(tokens) for bag in self.bags)]
        stack = torch.stack(parts, 1)
        pairs = torch.bmm(stack, stack.transpose(1, 2))[:, [1, 2, 2], [0, 0, 1]]
        return self.top(torch.cat([parts[0], pairs], 1))


class Autoencoder(nn.Module):
    """A variational autoencoder (Kingma & Welling 2014) whose noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(POINTS, 16), nn.ELU(), nn.Linear(16, 6))
        self.decode = nn.Sequential(nn.Linear(3, 16), nn.ELU(), nn.Linear(16, POINTS))

    def forward(self, input: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor) -> Results:
        mean, log_variance = self.encode(input).chunk(2, 1)
        decoded = self.decode(mean + noise * torch.exp(log_variance / 2))
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return Results(((decoded - labels) ** 2).sum(1).mean() + divergence, decoded)


class Flow(nn.Module):
    """Affine couplings (Dinh et al. 2017) to a normal distribution around each class's mean."""

    def __init__(self) -> None:
        super().__init__()
        half = POINTS // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 12), nn.Tanh(), nn.Linear(12, POINTS)) for _ in range(3)
        )
        self.means = nn.Embedding(CLASSES, POINTS)

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> Results:
        kept, changed = input.chunk(2, 1)
        volume = torch.zeros_like(input[:, 0])
        for net in self.nets:
            scale, shift = net(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            changed, volume = changed * torch.exp(scale) + shift, volume + scale.sum(1)
            kept, changed = changed, kept
        ends = torch.cat([kept, changed], 1)
        return Results((((ends - self.means(labels)) ** 2).sum(1) / 2 - volume).mean(), ends)


class Generator(nn.Module):
    """The generator of a DCGAN (Radford et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(POINTS, 16, 4, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input[:, :, None, None])


class Wave(nn.Module):
    """Dilated causal convolutions with gates (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.joins = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embed(tokens).transpose(1, 2)
        for i, (layer, join) in enumerate(zip(self.layers, self.joins, strict=True)):
            value = value + join(F.glu(layer(F.pad(value, (2**i, 0))), 1))
        return self.head(value.transpose(1, 2))


def _tokens(generator: np.random.Generator, size: int) -> Batch:
    tokens = generator.integers(0, VOCABULARY, (2, size, TIME))
    return {"tokens": tokens[0], "labels": tokens[1]}


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32)


def cases() -> Iterator[Case]:
    """Segmentation and detection, text, recommendation, then generative models."""

    def pixels(generator: np.random.Generator, size: int) -> Batch:
        return {
            "input": _normal(generator, size, 3, SIDE, SIDE),
            "labels": generator.integers(0, CLASSES, (size, SIDE, SIDE)),
        }

    def boxes(generator: np.random.Generator, size: int) -> Batch:
        return {"input": _normal(generator, size, 3, SIDE, SIDE), "labels": _normal(generator, size, 80, 7)}

    def clicks(generator: np.random.Generator, size: int) -> Batch:
        labels = generator.integers(0, 2, (size, 1)).astype(np.float32)
        tokens = generator.integers(0, VOCABULARY, (size, 4))
        return {"dense": _normal(generator, size, POINTS), "tokens": tokens, "labels": labels}

    def noisy(generator: np.random.Generator, size: int) -> Batch:
        points = _normal(generator, size, POINTS)
        return {"input": points, "noise": _normal(generator, size, 3), "labels": points}

    def classes(generator: np.random.Generator, size: int) -> Batch:
        return {"input": _normal(generator, size, POINTS), "labels": generator.integers(0, CLASSES, size)}

    def images(generator: np.random.Generator, size: int) -> Batch:
        return {"input": _normal(generator, size, POINTS), "labels": _normal(generator, size, 3, SIDE, SIDE)}

    loss = CrossEntropy(kind="cross_entropy")
    yield Case("unet-transposed", unet_transposed, pixels, PIXELS)
    yield Case("unet-resized", unet_resized, pixels, PIXELS)
    yield Case("detector", Detector, boxes, MSE)
    yield Case("einsum-attention", Attention, _tokens, loss)
    yield Case("bidirectional-lstm", bidirectional_lstm, _tokens, loss)
    yield Case("bidirectional-gru", bidirectional_gru, _tokens, loss)
    yield Case("wave", Wave, _tokens, loss)
    yield Case("recommender", Recommender, clicks, BinaryCrossEntropy(kind="bce_with_logits"))
    yield Case("autoencoder", Autoencoder, noisy, OWN, labels=("labels",))
    yield Case("flow", Flow, classes, OWN, labels=("labels",))
    yield Case("generator", Generator, images, MSE)
