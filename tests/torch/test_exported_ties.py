"""Between equal elements, and at limits, an exported file has the derivative of PyTorch's operator that it was made of.

Several of PyTorch's operators become the same operator of ONNX, and differ only there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name

import ortflow
from ortflow.exporter.file_gradients import run, training_graph, without_values

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda z: z.max(1).values,
    "min": lambda z: z.min(2).values,
    "max kept": lambda z: z.max(-1, keepdim=True).values,
    "max twice": lambda z: z.max(2).values.max(1).values,
    "amax": lambda z: z.amax((1, 2)),
    "amin": lambda z: z.amin(1),
    "max of all": lambda z: z.max() + z.min(),
    "maximum": lambda z: torch.maximum(z, z.flip(1)),
    "clamp": lambda z: z.clamp(0, 1),
    "clamp below": lambda z: z.clamp(min=0.0),
    "clamp above": lambda z: z.clamp_max(1.0),
    "clamp by tensors": lambda z: torch.clamp(z, -z.flip(1), z.flip(1) + 1),
    "clamp by equal tensors": lambda z: z.clip(z.flip(1).round(), z.flip(1).round()),
    "relu6": lambda z: F.relu6(6 * z),
    "hardtanh": F.hardtanh,
    "max pooling": lambda z: F.max_pool2d(z[:, None], 2),
    "adaptive max pooling": lambda z: F.adaptive_max_pool1d(z, 1),
    "adaptive max pooling of planes": lambda z: F.adaptive_max_pool2d(z, 1) + F.adaptive_max_pool2d(z, (1, 1)),
    "adaptive max pooling of volumes": lambda z: F.adaptive_max_pool3d(z[:, None], 1),
    "power pooling": lambda z: F.lp_pool1d(z, 2.0, 2),
    "power pooling of planes": lambda z: F.lp_pool2d(z, 4, 2),
    "norm of order 3": lambda z: z.norm(p=3, dim=-1),
    "norm of order 0.5": lambda z: torch.linalg.vector_norm(z, 0.5, dim=(1, 2)),
    "norm of order 3 of all": lambda z: torch.linalg.vector_norm(z, 3),
    "normalized": lambda z: F.normalize(z, p=3.0, dim=-1),
    "sinc": torch.sinc,
    "std": lambda z: z.std(-1),
    "std and mean": lambda z: torch.std_mean(z, -1)[0],
    "distances": lambda z: torch.cdist(z, z.flip(0)),
    "distances of order 1": lambda z: torch.cdist(z, z.flip(0), p=1.0),
    "distances of order 3": lambda z: torch.cdist(z, z.flip(0), p=3.0),
    "root of relu": lambda z: F.relu(z).sqrt(),
    "power of relu": lambda z: F.relu(z) ** 0.3,
    "root of relu6": lambda z: F.relu6(z).sqrt(),
    "root of a mean of relu": lambda z: F.relu(z - 1).mean(-1).sqrt(),
    "root of a sum of relus": lambda z: (F.relu(z) + F.relu(z.flip(1))).sqrt(),
    "largest by place": lambda z: z.new_zeros(4, 4, 2).scatter_reduce(2, PLACES, z, "amax", include_self=False),
    "smallest by place": lambda z: torch.scatter_reduce(z, 2, PLACES, z.flip(2), "amin", include_self=False),
    "largest by place and own": lambda z: z.scatter_reduce(2, PLACES, z.flip(2), "amax"),
    "mean by place": lambda z: z.scatter_reduce(2, PLACES, z.flip(2), "mean", include_self=False),
    "mean by place and own": lambda z: z.scatter_reduce(2, PLACES, z.flip(2), "mean"),
}
PLACES = (torch.arange(4) // 2).expand(4, 4, 4)
SHAPE = (4, 4, 4)


class Functions(nn.Module):
    """All functions of x plus a parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(SHAPE[1:])) for _ in FUNCTIONS])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [f(x + shift) for f, shift in zip(FUNCTIONS.values(), self.shifts, strict=True)]
        factors = [torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape).to(x.dtype) for part in parts]
        return torch.stack([(part * factor).sum() for part, factor in zip(parts, factors, strict=True)])


def test_the_derivative_is_pytorch_s(tmp_path: Path) -> None:
    path, module = tmp_path / "model.onnx", Functions()
    generator = torch.Generator().manual_seed(0)
    ortflow.export_for_training(module, {"x": torch.randn(SHAPE, generator=generator)}, path, dynamic_shapes={})
    names = [f"shifts.{place}" for place in range(len(FUNCTIONS))]
    model = without_values(onnx.load(path), names)
    made, trained = training_graph(model, names, [], {model.graph.output[0].name: "weights"})
    assert trained == names
    zeros = {name: np.zeros(SHAPE[1:], np.float32) for name in names}
    few = torch.randint(-1, 3, SHAPE, generator=generator).float()
    wrong = []
    for x in (torch.zeros(SHAPE), torch.ones(SHAPE), few):
        exact = Functions().double()
        exact(x.double()).sum().backward()
        found = run(made, {"x": x.numpy(), **zeros, "weights": np.ones(len(names), np.float32)})
        for name, function, shift in zip(names, FUNCTIONS, exact.shifts, strict=True):
            assert shift.grad is not None
            if not np.allclose(found[f"{name}_grad"], shift.grad.numpy(), rtol=1e-5, atol=1e-6):
                wrong.append((function, x.unique().tolist()))
    assert wrong == []
