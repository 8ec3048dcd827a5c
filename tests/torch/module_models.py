"""Small modules, each an unusual but plausible use of one operator or of several adjacent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations

import numpy as np
import torch
from case import Batch, Case
from torch import nn
from torch.nn import functional

from ortflow.workflow.spec.model import Regression

MSE = Regression(kind="mse")


class Around(nn.Module):
    """`body` between operators with their own parameters, so that gradients pass through it and around it."""

    def __init__(self, body: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(shape))
        self.shift = nn.Parameter(torch.randn(shape) / 2)
        self.body = body
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(torch.tanh(x * self.scale) + self.shift)
        return y * self.gain


class Call(nn.Module):
    """A function as a module, with parameters of the shapes given as further arguments."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def module_case(name: str, body: Callable[[], nn.Module], *shape: int, free: tuple[str, ...] = ()) -> Case:
    """A case whose input is [batch, *shape] and whose labels have the shape of the module's output."""

    def build() -> nn.Module:
        return Around(body(), shape)

    @cache
    def label_shape() -> tuple[int, ...]:
        with torch.no_grad():
            return tuple(build().eval()(torch.zeros(4, *shape)).shape[1:])

    def batch(generator: np.random.Generator, size: int) -> Batch:
        x = generator.normal(size=(size, *shape)).astype(np.float32)
        return {"x": x, "labels": generator.normal(size=(size, *label_shape())).astype(np.float32)}

    return Case(name, build, batch, MSE, free=free)


class Mixer(nn.Module):
    """A depthwise convolution between two linear layers, each of the other layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.conv = nn.Conv1d(32, 32, 3, groups=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(self.first(x).transpose(1, 2)).transpose(1, 2))


def causal() -> nn.Module:
    """Padded before, as in state space models."""
    return nn.Sequential(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(8, 8, 4, groups=8))


def cut() -> nn.Module:
    """Padded on both sides and cut at the end, as in transformers' Mamba."""
    return Call(lambda x, w: functional.conv1d(x, w, padding=3, groups=8)[..., :9], (8, 1, 4))


def twice() -> nn.Module:
    """Two of them in a row."""
    return nn.Sequential(nn.Conv1d(6, 6, 3, groups=2), nn.SiLU(), nn.Conv1d(6, 6, 3, groups=6))


def convolutions() -> Iterator[Case]:
    """Grouped, depthwise, dilated, padded to one side, over one to three axes."""
    for name, make, *shape in (
        ("depthwise1d", lambda: nn.Conv1d(8, 8, 3, groups=8, padding=1), 8, 11),
        ("depthwise1d-causal", causal, 8, 9),
        ("depthwise1d-cut", cut, 8, 9),
        ("depthwise1d-between-linears", Mixer, 16, 32),
        ("grouped1d-same", lambda: nn.Conv1d(8, 12, 5, groups=4, padding="same", bias=False), 8, 10),
        ("grouped1d-dilated", lambda: nn.Conv1d(6, 9, 3, groups=3, dilation=2, stride=2, padding=3), 6, 13),
        ("grouped1d-twice", twice, 6, 12),
        ("grouped3d", lambda: nn.Conv3d(4, 6, (3, 2, 3), groups=2, stride=(2, 1, 2), padding=(1, 0, 1)), 4, 5, 4, 6),
        ("depthwise3d", lambda: nn.Conv3d(5, 10, 3, groups=5, padding=1, dilation=(1, 2, 1), bias=False), 5, 4, 5, 4),
        ("conv3d", lambda: nn.Conv3d(3, 4, 2), 3, 4, 4, 4),
        ("grouped2d", lambda: nn.Conv2d(6, 9, (3, 1), groups=3, stride=(1, 2), padding=(2, 1)), 6, 6, 7),
        ("depthwise2d-dilated", lambda: nn.Conv2d(5, 15, 3, groups=5, dilation=(2, 1), padding="same"), 5, 7, 6),
        ("transposed1d-grouped", lambda: nn.ConvTranspose1d(6, 4, 3, groups=2, stride=2, output_padding=1), 6, 7),
        ("transposed3d-depthwise", lambda: nn.ConvTranspose3d(3, 3, 2, groups=3, stride=(2, 1, 1)), 3, 3, 4, 3),
        ("transposed2d-grouped", lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2, padding=1), 4, 4, 5),
    ):
        yield module_case(name, make, *shape)


def interaction(x: torch.Tensor) -> torch.Tensor:
    """All pairs of a sample's vectors, as in recommendation models."""
    left, right = torch.tril_indices(6, 6, offset=-1)
    return torch.bmm(x, x.transpose(1, 2))[:, left, right]


def turned(order: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """A product whose axes are put in this order, and back."""
    back = [order.index(axis) for axis in range(len(order))]
    return lambda x, w: torch.tanh((x @ w).permute(order)).permute(back)


def products() -> Iterator[Case]:
    """Products with their axes in every order, including orders that leave neither rows nor columns contiguous."""
    yield module_case("interaction", lambda: Call(interaction), 6, 5)
    for order in permutations(range(3)):
        yield module_case(f"product-{order}", lambda order=order: Call(turned(order), (5, 7)), 6, 5)
    for order in ((0, 2, 3, 1), (1, 2, 3, 0), (2, 0, 3, 1), (2, 1, 3, 0), (3, 2, 1, 0), (0, 3, 1, 2)):
        yield module_case(f"product-{order}", lambda order=order: Call(turned(order), (3, 5, 7)), 3, 6, 5)


class Several(nn.Module):
    """The outputs of several modules for the input, in one row per sample."""

    def __init__(self, bodies: dict[str, nn.Module]) -> None:
        super().__init__()
        self.bodies = nn.ModuleDict(bodies)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([body(x).flatten(1) for body in self.bodies.values()], 1)


def kinks() -> nn.Module:
    """Activations of a ReLU's output, half of which is 0."""
    bodies = {
        "elu": nn.ELU(0.5),
        "celu": nn.CELU(0.6),
        "selu": nn.SELU(),
        "prelu": nn.PReLU(),
        "softplus": nn.Softplus(),
        "mish": nn.Mish(),
        "leaky": nn.LeakyReLU(0.2),
        "relu6": nn.ReLU6(),
        "hardtanh": nn.Hardtanh(0.0, 2.0),
        "clamp": Call(lambda x: x.clamp(0.0, 1.5)),
        "hardswish": nn.Hardswish(),
        "abs": Call(torch.abs),
        "amax": Call(lambda x: x.amax(1)),
        "adaptive": nn.AdaptiveMaxPool1d(1),
    }
    return nn.Sequential(nn.ReLU(), Several(bodies))


def pools() -> nn.Module:
    """Pooling whose windows cross the edge, are apart, overlap or are counted differently."""
    bodies = {
        "ceil": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        "dilated": nn.MaxPool2d(2, 1, dilation=2),
        "apart": nn.MaxPool2d(2, 3),
        "average": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        "counted": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        "adaptive": nn.AdaptiveAvgPool2d((3, 2)),
        "largest": nn.AdaptiveMaxPool2d((2, 2)),
        "lp": nn.LPPool2d(2, 2),
        "unfold": nn.Unfold(2, stride=2, padding=1),
    }
    return Several(bodies)


def pads() -> nn.Module:
    """Padding of every kind, cropping, flips and rolls of an image."""
    bodies = {
        "cropped": nn.ConstantPad2d((-1, 2, 1, -2), 0.7),
        "reflected": nn.ReflectionPad2d((1, 2, 3, 0)),
        "replicated": nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate", groups=2),
        "circular": nn.CircularPad2d((1, 2, 3, 1)),
        "rolled": Call(lambda x: torch.roll(x, (1, -2), (1, 2))),
        "flipped": Call(lambda x: x.flip(1, 3)),
        "strided": Call(lambda x: x[:, ::2, 1::3]),
        "windows": Call(lambda x: x.unfold(2, 3, 2)),
        "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
    }
    return Several(bodies)


def vectors() -> nn.Module:
    """Products of vectors, of batches, by einsum; a weight divided by its norm along a vector."""
    bodies = {
        "right": Call(lambda x, w: x @ w, (4,)),
        "left": Call(lambda x, w: w @ x, (3,)),
        "stack": Call(lambda x, w: x.unsqueeze(1) @ w, (5, 4, 2)),
        "einsum": Call(lambda x, w, v: torch.einsum("bij,jk,ik->bk", x, w, v), (4, 2), (3, 2)),
        "spectral": Call(lambda x, w, u: x @ (w / (w.t() @ u).norm()), (4, 5), (4,)),
        "bilinear": Call(lambda x, w, b: functional.bilinear(x[:, 0], x[:, 1], w, b), (5, 4, 4), (5,)),
        "base": Call(lambda x: x**3 + 2.0**x),
        "power": Call(lambda x, w: (x * x + 0.5) ** w, (4,)),
        "summed": Call(lambda x: x.cumsum(1).flip(1)),
    }
    return Several(bodies)


def indices() -> nn.Module:
    """Gathering and scattering by negative, repeated and computed indices; extremes and sorting."""
    bodies = {
        "negative": Call(lambda x: x[:, [2, -1, 0, 2]]),
        "pairs": Call(lambda x: x[:, [0, 1, -1], [3, -2, 0]]),
        "added": Call(lambda x: x.new_zeros(x.shape[0], 4, 4).index_add(1, torch.tensor([0, 3, 0]), x)),
        "sorted": Call(lambda x: x.sort(2)[0]),
        "largest": Call(lambda x: x.gather(2, x.argmax(2, keepdim=True))),
        "where": Call(lambda x, w: torch.where(x > 0, x, w), (4,)),
        "filled": Call(lambda x: x.masked_fill(x > 0.3, -2.0)),
        "three": Call(lambda x, w, v: torch.minimum(torch.maximum(x, w), v), (4,), (3, 1)),
        "softmax": Call(lambda x: x.log_softmax(1) + x.softmax(1)),
    }
    return Several(bodies)


def mixtures() -> Iterator[Case]:
    """Many operators over one input."""
    yield module_case("kinks", kinks, 4, 6)
    yield module_case("pools", pools, 3, 6, 8)
    yield module_case("pads", pads, 4, 6, 6)
    yield module_case("vectors", vectors, 3, 4)
    yield module_case("indices", indices, 3, 4)
