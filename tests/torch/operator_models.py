"""Small modules around one operator each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name

BOTH = ("dynamo", "torchscript")


@dataclass(frozen=True)
class Operator:
    """A module of one input, the input's shape, and the exporters to test."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    exporters: tuple[str, ...] = BOTH
    rows: int = 0
    """Where not 0, the input holds integers below it."""

    def example(self) -> torch.Tensor:
        """The input, the same each time."""
        generator = torch.Generator().manual_seed(4)
        if self.rows:
            return torch.randint(0, self.rows, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator)


class Function(nn.Module):
    """A function of x and of parameters of the given shapes."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.parameters_ = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.parameters_)


def function(name: str, f: Callable[..., torch.Tensor], shape: tuple[int, ...], *shapes: Any, **more: Any) -> Operator:
    return Operator(name, lambda: Function(f, *shapes), shape, **more)


IMAGE = (3, 4, 6, 7)


class Enlarged(nn.Module):
    """A convolution, resized."""

    def __init__(self, like: bool = False, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 3, padding=1, stride=2 if like else 1)
        self.like, self.options = like, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = {"size": x.shape[-2:]} if self.like else {}
        return F.interpolate(self.conv(x), **size, **self.options)


RESIZE = [
    *(
        Operator(f"interpolate {options}", lambda options=options: Enlarged(**options), IMAGE, exporters)
        for options, exporters in (
            ({"size": (9, 11)}, BOTH),
            ({"scale_factor": 2}, ("torchscript", "free axes")),
            ({"scale_factor": 1.7, "mode": "bilinear"}, ("torchscript", "free axes")),
            ({"size": (11, 13), "mode": "bilinear", "align_corners": True}, (*BOTH, "free axes")),
            ({"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True}, (*BOTH, "free axes")),
            ({"scale_factor": 2, "mode": "bicubic"}, ("torchscript",)),
            ({"size": (4, 5), "mode": "bilinear", "antialias": True}, ("dynamo",)),
            ({"like": True}, (*BOTH, "free axes")),
            ({"like": True, "mode": "bilinear"}, (*BOTH, "free axes")),
        )
    ),
    Operator(
        "Upsample 1d",
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Upsample(scale_factor=2, mode="linear")),
        (3, 4, 6),
        ("torchscript", "free axes"),
    ),
    Operator(
        "Upsample 3d",
        lambda: nn.Sequential(nn.Conv3d(2, 2, 1), nn.Upsample(scale_factor=2, mode="trilinear")),
        (3, 2, 3, 4, 5),
        ("torchscript",),
    ),
]


class FrozenNorm(nn.Module):
    """A BatchNorm in evaluation mode beside one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fixed, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.fixed.running_mean.normal_()
        self.fixed.running_var.uniform_(0.5, 2)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.sigmoid(self.fixed(self.conv(x))))


def two_plain_norms() -> nn.Module:
    """As in OLMo: both normalisations read the same constants."""
    norms = [nn.LayerNorm(6, elementwise_affine=False) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), norms[0], nn.Linear(6, 6), norms[1])


class FixedLSTM(nn.Module):
    """A recurrent layer that does not train, after one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(6, 6), nn.LSTM(6, 4, batch_first=True)
        for parameter in self.lstm.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.linear(x))[0]


NORMS = [
    Operator("frozen BatchNorm", FrozenNorm, IMAGE),
    Operator("LayerNorm without parameters", two_plain_norms, (3, 5, 6)),
    Operator("fixed LSTM", FixedLSTM, (3, 5, 6), ("dynamo",)),
]


class Bags(nn.Module):
    """Three bags for each row of x: of four indices, none and one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.arange(x.shape[0]) * x.shape[1]
        offsets = torch.stack([first, first + 4, first + 4], 1).reshape(-1)
        if self.bag.include_last_offset:
            offsets = torch.cat([offsets, offsets[-1:] + 1])
        return self.bag(x.reshape(-1), offsets).reshape(x.shape[0], -1)


class WeightedBag(nn.Module):
    """A bag whose rows have trained weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.factors = nn.EmbeddingBag(10, 4, mode="sum"), nn.Parameter(torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag(x, per_sample_weights=self.factors.expand(x.shape))


def bags(name: str, build: Callable[[], nn.Module], exporters: tuple[str, ...] = BOTH) -> Operator:
    return Operator(f"EmbeddingBag {name}", build, (3, 5), exporters, rows=10)


TABLES = [
    *(bags(mode, lambda mode=mode: nn.EmbeddingBag(10, 4, mode=mode)) for mode in ("sum", "mean", "max")),
    *(bags(f"{mode} offsets", lambda mode=mode: Bags(mode=mode)) for mode in ("sum", "mean", "max")),
    bags("last offset", lambda: Bags(mode="mean", include_last_offset=True)),
    bags("padding", lambda: nn.EmbeddingBag(10, 4, padding_idx=2), ("dynamo",)),
    bags("weighted", WeightedBag),
]
LINEAR = [
    *(
        function(f"einsum {equation}", lambda x, y, e=equation: torch.einsum(e, x, y), shape, other)
        for equation, shape, other in (
            ("...ij,jk->...ik", (3, 2, 5, 6), (6, 4)),
            ("b...d,...d->b...", (3, 5, 6), (5, 6)),
            ("bii,i->bi", (3, 6, 6), (6,)),
        )
    ),
    function(
        "fold",
        lambda x: F.fold(x, (6, 7), (2, 3), padding=1, stride=2),
        (3, 24, 16),
        exporters=("dynamo",),
    ),
    function("unfold", lambda x: F.unfold(x, (2, 3), padding=1, stride=2), IMAGE),
]


def sampled(x: torch.Tensor, grid: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.grid_sample(x, (grid + 0.0).expand(x.shape[0], *grid.shape), align_corners=False, **options)


OTHERS = [
    *(
        function(
            f"grid_sample {padding}",
            lambda x, grid, p=padding: sampled(x, grid, padding_mode=p),
            IMAGE,
            (5, 5, 2),
            exporters=("dynamo", "free axes"),
        )
        for padding in ("zeros", "border", "reflection")
    ),
    *(
        function(
            f"grid_sample bicubic {padding}",
            lambda x, grid, p=padding: sampled(x, grid, padding_mode=p, mode="bicubic"),
            IMAGE,
            (5, 5, 2),
            exporters=("dynamo",),
        )
        for padding in ("zeros", "border", "reflection")
    ),
    *(
        function(f.__name__, lambda x, f=f: f(x.tanh() * 0.9), (3, 5, 6), exporters=("torchscript",))
        for f in (torch.atan, torch.asin, torch.acos, torch.tan)
    ),
    function("atan2", lambda x, y: torch.atan2(x, y), (3, 5, 6), (6,)),
    function("diagonal", lambda x: torch.diagonal(x, dim1=1, dim2=2), (3, 5, 5), exporters=("torchscript",)),
    function(
        "scatter_reduce",
        lambda x: x.new_zeros(x.shape[0], 3, 6).scatter_reduce(
            1, torch.tensor([0, 1, 1, 2, 0])[None, :, None].expand_as(x), x, "amax"
        ),
        (3, 5, 6),
        exporters=("dynamo",),
    ),
    function("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE, exporters=("free axes",)),
    function("local_response_norm", lambda x: F.local_response_norm(x, 3), IMAGE, exporters=("torchscript",)),
    function("prod", lambda x: x.prod(1), (3, 5, 6)),
    function("fmod", lambda x: torch.fmod(x, 0.7), (3, 5, 6)),
]

CASES = [*RESIZE, *NORMS, *TABLES, *LINEAR, *OTHERS]
