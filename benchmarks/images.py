"""Time of a training step of image and graph models on the CPU: ortflow against PyTorch eager.

    python benchmarks/images.py [--models resnet18 squeezenet unet generator graph --threads 2 --rounds 5]

Each model is exported by `ortflow.export_for_training` and trained from the same weights on the same batches, fp32,
AdamW (fused in PyTorch), the same number of threads. Both take turns, a few steps each, because a machine's speed
drifts; the first losses must agree. Prints medians, and ortflow's time over PyTorch's: of the wall clock, and of CPU
seconds, which other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from step import DECAY, RATE, OrtflowStep, graphs_of
from torch import nn
from torchvision import models

import ortflow
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.spec.run import TrainerRunSpec

AGREEMENT = 1e-4
"""Largest relative difference of the first loss; batch statistics of random weights amplify rounding."""
Arrays = dict[str, np.ndarray]


class UNet(nn.Module):
    """Three levels (Ronneberger et al. 2015), enlarged by transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_block(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[2:0:-1])
        self.join = nn.ModuleList(_block(2 * w, w) for w in widths[2:0:-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kept = []
        for place, block in enumerate(self.down):
            input = block(nn.functional.max_pool2d(input, 2) if place else input)
            kept.append(input)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            input = join(torch.cat([skip, up(input)], 1))
        return self.head(input)


def _block(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def generator(width: int = 64) -> nn.Module:
    """DCGAN's (Radford et al. 2016), for images of 64 x 64."""
    layers: list[nn.Module] = []
    sizes = [100, 8 * width, 4 * width, 2 * width, width]
    for place, (into, out) in enumerate(itertools.pairwise(sizes)):
        stride, pad = (2, 1) if place else (1, 0)
        layers += [nn.ConvTranspose2d(into, out, 4, stride, pad, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


class GraphAttention(nn.Module):
    """Two layers (Velickovic et al. 2018) of 4 heads; each graph brings its edges, [2, edges] of source and target."""

    def __init__(self, features: int = 64, classes: int = 10, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.turn = nn.ModuleList(nn.Linear(features, features, bias=False) for _ in range(2))
        self.score = nn.ParameterList(nn.Parameter(torch.randn(2, heads, features // heads) / 4) for _ in range(2))
        self.head = nn.Linear(features, classes)

    def forward(self, input: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[:, 0], edges[:, 1]
        for turn, score in zip(self.turn, self.score, strict=True):
            input = nn.functional.elu(self._layer(turn(input), score, source, target))
        return self.head(input.mean(1))

    def _layer(
        self, values: torch.Tensor, score: torch.Tensor, source: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        batch, nodes, width = values.shape
        each = values.view(batch, nodes, self.heads, -1)
        by_source, by_target = ((each * part).sum(-1) for part in score)
        from_node, to_node = (place.unsqueeze(-1).expand(-1, -1, self.heads) for place in (source, target))
        raw = nn.functional.leaky_relu(by_source.gather(1, from_node) + by_target.gather(1, to_node), 0.2)
        weight = raw.exp()
        total = torch.zeros_like(by_target).scatter_add(1, to_node, weight)
        share = weight / (total.gather(1, to_node) + 1e-9)
        read = values.gather(1, source.unsqueeze(-1).expand(-1, -1, width)).view(
            batch, -1, self.heads, width // self.heads
        )
        sent = (read * share.unsqueeze(-1)).reshape(batch, -1, width)
        return torch.zeros_like(values).scatter_add(1, target.unsqueeze(-1).expand(-1, -1, width), sent)


def _images(random: np.random.Generator, batch: int) -> Arrays:
    return {
        "input": random.standard_normal((batch, 3, 64, 64), np.float32),
        "labels": random.integers(0, 10, batch),
    }


def _pictures(random: np.random.Generator, batch: int) -> Arrays:
    shape = (batch, 3, 64, 64)
    return {"input": random.standard_normal(shape, np.float32), "labels": random.standard_normal(shape, np.float32)}


def _noise(random: np.random.Generator, batch: int) -> Arrays:
    noise = random.standard_normal((batch, 100, 1, 1), np.float32)
    return {"input": noise, "labels": random.standard_normal((batch, 3, 64, 64), np.float32)}


def _graphs(random: np.random.Generator, batch: int, nodes: int = 250, edges: int = 1000) -> Arrays:
    return {
        "input": random.standard_normal((batch, nodes, 64), np.float32),
        "edges": random.integers(0, nodes, (batch, 2, edges)),
        "labels": random.integers(0, 10, batch),
    }


def _squeezenet() -> nn.Module:
    module = models.squeezenet1_1(num_classes=10)
    module.classifier[0] = nn.Identity()  # a dropout, whose random numbers would differ
    return module


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Arrays], str]] = {
    "resnet18": (lambda: models.resnet18(num_classes=10), _images, "cross_entropy"),
    "squeezenet": (_squeezenet, _images, "cross_entropy"),
    "unet": (UNet, _pictures, "mse"),
    "generator": (generator, _noise, "mse"),
    "graph": (GraphAttention, _graphs, "cross_entropy"),
}
"""Name -> module, batches, loss."""


def ortflow_step(
    module: nn.Module, arrays: Arrays, loss: str, options: argparse.Namespace, folder: Path
) -> Callable[[Arrays], float]:
    """One step of the trainer that ranks run: the loss before the update."""
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [name for name in arrays if name != "labels"]
        ortflow.export_for_training(
            module, tuple(torch.from_numpy(arrays[name]) for name in names), path, input_names=names
        )
    optimizer = {"name": "adamw", "lr": RATE, "weight_decay": DECAY, "no_decay": []}
    spec = TrainerRunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"path": str(path), "loss": {"kind": loss}},
            "data": {"train": {"path": "none"}, "micro_batch": options.batch},
            "train": {"steps": 1, "optimizer": optimizer},
        }
    )
    return OrtflowStep(graphs_of(spec, folder), spec, options.threads, find_library().path).of


class TorchStep:
    """The same in PyTorch."""

    def __init__(self, module: nn.Module, loss: str) -> None:
        self._module = module
        self._loss = {"cross_entropy": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}[loss]
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def __call__(self, arrays: Arrays) -> float:
        """The loss before the update."""
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        labels = given.pop("labels")
        loss = self._loss(self._module(*given.values()), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def race(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """ortflow's time over PyTorch's: wall clock, CPU seconds."""
    build, draw, loss = MODELS[name]
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    module = build().train()
    with tempfile.TemporaryDirectory() as folder:
        first = draw(random, options.batch)
        steps = {"ortflow": ortflow_step(module, first, loss, options, Path(folder)), "torch": TorchStep(module, loss)}
        losses = [step(first) for step in steps.values()]
        if not abs(losses[0] - losses[1]) <= AGREEMENT * abs(losses[1]):
            raise SystemExit(f"{name}: the losses differ, so the times mean nothing: {losses}")
        wall: dict[str, list[float]] = {each: [] for each in steps}
        cpu: dict[str, list[float]] = {each: [] for each in steps}
        for _ in range(options.rounds):
            for each, step in steps.items():
                step(draw(random, options.batch))
                times = []
                for _ in range(options.block):
                    arrays = draw(random, options.batch)
                    start = time.perf_counter(), time.process_time()
                    step(arrays)
                    times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
                wall[each].append(statistics.median(seconds for seconds, _ in times))
                cpu[each].append(statistics.median(seconds for _, seconds in times))
    ratios = [statistics.median(a / b for a, b in zip(t["ortflow"], t["torch"], strict=True)) for t in (wall, cpu)]
    mine, theirs = (1e3 * statistics.median(wall[each]) for each in ("ortflow", "torch"))
    print(
        f"{name:12} {mine:8.1f} ms {theirs:8.1f} ms   {ratios[0]:.2f} of the wall clock, {ratios[1]:.2f} of CPU seconds"
    )
    return ratios[0], ratios[1]


def main() -> None:
    """Race each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for name, value in (("batch", 8), ("threads", 2), ("rounds", 5), ("block", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"CPU kernels: {find_library().note}; batch {options.batch}, {options.threads} threads")
    print(f"{'':12} {'ortflow':>11} {'torch':>11}   ortflow / torch")
    for name in options.models:
        race(name, options)


if __name__ == "__main__":
    main()
