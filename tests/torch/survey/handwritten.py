"""Models as users write them: each has one idea that no library's model has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from case import Batch, Case
from sensitive import Capsules, HardGates, Neighbours, Separator, SpatialTransformer
from torch import Tensor, nn
from torch.nn import functional

from ortflow.workflow.spec.model import CrossEntropy, Loss, Regression

WIDTH, CLASSES, TIME = 24, 5, 12


class UNet(nn.Module):
    """Two levels down and up again, by transposed convolution or by interpolation."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)])
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2) if transposed else nn.Conv2d(16, 8, 1)
        self.transposed, self.last = transposed, nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = functional.silu(self.norms[0](self.first(x)))
        b = functional.silu(self.norms[1](self.down(a)))
        up = self.up(b) if self.transposed else functional.interpolate(self.up(b), scale_factor=2, mode="bilinear")
        return self.last(torch.cat([a, up], 1))


class Generator(nn.Module):
    """DCGAN's generator, trained to copy pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, :, None, None])


class Interactions(nn.Module):
    """DLRM: products of all pairs of features, the lower triangle of them."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(WIDTH, 6 * 8), nn.Linear(WIDTH + 15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = torch.tanh(self.features(x)).view(-1, 6, 8)
        rows, columns = torch.tril_indices(6, 6, -1)
        return self.head(torch.cat([x, torch.bmm(v, v.transpose(1, 2))[:, rows, columns]], 1))


class Depthwise(nn.Module):
    """Linear, depthwise Conv1d over time, Linear."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.inside, self.conv = nn.Linear(WIDTH, 32), nn.Conv1d(32, 32, 3, padding=2, groups=groups)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.inside(x).transpose(1, 2))[..., :TIME]
        return self.head(functional.silu(h).transpose(1, 2).mean(1))


class Recurrent(nn.Module):
    """A bidirectional LSTM, GRU or RNN and the mean of its output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.head = kind(WIDTH, 16, batch_first=True, bidirectional=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0].mean(1))


class Einsum(nn.Module):
    """Attention written with einsum, an ellipsis in it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, TIME, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("...qd,...kd->...qk", q, k).mul(0.4).softmax(-1)
        out = torch.einsum("bhqk,bhkd->bqhd", weights, v)
        return self.head(out.flatten(2).mean(1))


class Spectral(nn.Module):
    """Spectral normalisation by hand: one power iteration in the graph, by matrix times vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("start", functional.normalize(torch.randn(WIDTH), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        v = self.weight.t() @ self.start
        v = v / (v.norm() + 1e-12)
        return self.head(torch.relu(x @ (self.weight / (self.weight @ v).norm())))


class Flow(nn.Module):
    """Two affine couplings; the loss is on their output."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(half, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            a, b = b * torch.exp(torch.tanh(scale)) + shift, a
        return torch.cat([a, b], 1)


class Autoencoder(nn.Module):
    """A variational autoencoder whose noise is an input, with log(p + 1e-8)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        latent = mean + functional.softplus(spread) * x[:, :8]
        return self.decode(latent) + torch.log(torch.sigmoid(mean).mean(1, keepdim=True) + 1e-8)


class Experts(nn.Module):
    """A mixture of experts with dense routing by the two largest gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, CLASSES) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.gate(x).topk(2)
        weights = torch.zeros(x.shape[0], 4, dtype=x.dtype).scatter(1, places, values.softmax(1))
        return torch.einsum("bw,ewc,be->bc", x, self.experts, weights)


class Pooled(nn.Module):
    """Pooling of every kind, padding by reflection, a strided slice and a flip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=4), nn.Linear(8 * 5, CLASSES)
        self.slope = nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.slope(self.a(functional.pad(x, (1, 1, 1, 1), mode="reflect")))
        h = (
            functional.max_pool2d(h, 3, 2, 0, ceil_mode=True)
            + functional.avg_pool2d(h, 2, 2, ceil_mode=True, count_include_pad=False)[..., : (h.shape[-1] + 1) // 2]
        )
        h = functional.hardswish(self.b(h)).flip(-1)[:, :, ::2, 1:]
        parts = [
            h.amax((2, 3)),
            h.mean((2, 3)),
            h.std((2, 3)),
            h.logsumexp((2, 3)),
            functional.adaptive_avg_pool2d(h, 1).flatten(1),
        ]
        return self.head(torch.cat(parts, 1))


class Norms(nn.Module):
    """Instance, group, local response and weight normalisation; RMS norm with a small epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.norms = nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.Mish(), nn.GroupNorm(2, 8), nn.CELU(0.7))
        self.gain, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms(self.conv(x)).mean((2, 3))
        return self.head(self.gain * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-8))


class Tables(nn.Module):
    """A recommender: embedding bags and a table of positions read by index."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.users = nn.Embedding(40, 16), nn.EmbeddingBag(40, 16, mode="mean")
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.cat([self.items(tokens).cumsum(1)[:, -1], self.users(tokens)], 1))


class Patches(nn.Module):
    """unfold and fold: local attention over patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(27, 27), nn.Linear(3 * 16 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 3, padding=1, stride=2).transpose(1, 2)
        back = functional.fold(torch.tanh(self.mix(patches)).transpose(1, 2), (16, 16), 3, padding=1, stride=2)
        return self.head(back.flatten(1))


class Sampled(nn.Module):
    """A spatial transformer: an affine grid and bilinear sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.head = nn.Linear(3 * 16 * 16, 6), nn.Conv2d(3, CLASSES, 16)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias.data = torch.tensor([0.9, 0.1, 0.05, -0.1, 0.8, 0.03])

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x.flatten(1)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, [x.shape[0], 3, 16, 16], align_corners=False)
        return self.head(functional.grid_sample(x, grid, align_corners=False)).flatten(1)


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(TIME)[None] >= (8 + (x[:, 0, :1] > 0).long() * 2)
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


class Metric(nn.Module):
    """Cosine similarity to prototypes, a learned temperature, clamps and where."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.temperature = nn.Parameter(torch.randn(CLASSES, WIDTH)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        near = functional.normalize(x, dim=-1) @ functional.normalize(self.prototypes, dim=-1).t()
        near = torch.where(near > 0, near, near.clamp(-0.2, 0.2) * 0.5)
        return near * self.temperature.exp() - torch.cdist(x, self.prototypes).pow(2) * 0.01


class Fourier(nn.Module):
    """A filter of learned frequencies (GFNet, Fourier neural operators), over time and over images."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.axes = sizes, tuple(range(1, 1 + len(sizes)))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.filter = nn.Parameter(0.5 * torch.randn(*sizes[:-1], sizes[-1] // 2 + 1, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).reshape(len(x), *self.sizes, WIDTH)
        spectrum = torch.fft.rfftn(x, dim=self.axes, norm="ortho") * torch.view_as_complex(self.filter)
        mixed = torch.fft.irfftn(spectrum, s=self.sizes, dim=self.axes, norm="ortho")
        return self.head((x + functional.gelu(mixed)).mean(self.axes))


Make = Callable[[np.random.Generator, int], np.ndarray]


def _rows(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.standard_normal((size, WIDTH), dtype=np.float32)


def _series(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.standard_normal((size, TIME, WIDTH), dtype=np.float32)


def _images(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.standard_normal((size, 3, 16, 16), dtype=np.float32)


def _indices(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.integers(0, 40, (size, TIME))


Target = tuple[int, ...] | None
MODELS: dict[str, tuple[Callable[[], nn.Module], Make, Target]] = {
    "unet-transposed": (lambda: UNet(True), _images, (16, 16)),
    "unet-resize": (lambda: UNet(False), _images, (16, 16)),
    "dcgan": (Generator, _rows, None),
    "dlrm": (Interactions, _rows, ()),
    "depthwise-conv1d": (lambda: Depthwise(32), _series, ()),
    "grouped-conv1d": (lambda: Depthwise(4), _series, ()),
    "lstm": (lambda: Recurrent(nn.LSTM), _series, ()),
    "gru": (lambda: Recurrent(nn.GRU), _series, ()),
    "rnn": (lambda: Recurrent(nn.RNN), _series, ()),
    "einsum-attention": (Einsum, _series, ()),
    "spectral-norm": (Spectral, _rows, ()),
    "flow": (Flow, _rows, None),
    "autoencoder": (Autoencoder, _rows, None),
    "experts": (Experts, _rows, ()),
    "pooling": (Pooled, _images, ()),
    "norms": (Norms, _images, ()),
    "tables": (Tables, _indices, ()),
    "fold": (Patches, _images, ()),
    "grid-sample": (Sampled, _images, ()),
    "encoder-mask": (Encoder, _series, ()),
    "metric": (Metric, _rows, ()),
    "fourier": (lambda: Fourier(TIME), _series, ()),
    "fourier-2d": (lambda: Fourier(3, 4), _series, ()),
    "capsules": (lambda: Capsules(CLASSES), _images, ()),
    "conv-tasnet": (lambda: Separator(WIDTH), _series, None),
    "spatial-transformer": (lambda: SpatialTransformer(CLASSES), _images, ()),
    "hard-gates": (lambda: HardGates(CLASSES), _images, ()),
    "neighbours": (lambda: Neighbours(WIDTH, CLASSES), _series, ()),
}
"""Name -> module, its input, shape of a label; None where it is trained towards real values."""
SHAPES = {"dcgan": (3, 16, 16), "flow": (WIDTH,), "autoencoder": (WIDTH,), "conv-tasnet": (TIME * WIDTH,)}


def names() -> list[str]:
    """`handwritten/name` of each."""
    return [f"handwritten/{name}" for name in MODELS]


def case(name: str) -> Case:
    """A case of the survey."""
    build, make, target = MODELS[name]
    inputs = "tokens" if make is _indices else "x"

    def batch(generator: np.random.Generator, size: int) -> Batch:
        x = make(generator, size)
        if target is None:
            return {inputs: x, "labels": generator.standard_normal((size, *SHAPES[name]), dtype=np.float32)}
        return {inputs: x, "labels": generator.integers(0, CLASSES, (size, *target))}

    loss: Loss = Regression(kind="mse", output="output")
    if target is not None:
        loss = CrossEntropy(kind="cross_entropy", output="output", class_axis=1 if target else -1)
    return Case(f"handwritten/{name}", build, batch, loss)
