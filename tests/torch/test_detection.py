"""Detectors, flows and volume rendering train like PyTorch: DETR, RoiAlign, determinants, running products."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed")
import torch
import torchvision
from case import Batch, Case
from following import distances
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ortflow.workflow.spec.model import OutputLoss, Regression

CLASSES, QUERIES, SIDE = 5, 4, 32


class Found(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Detr(nn.Module):
    """transformers' DETR and the loss of boxes that are matched already."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        config = DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
            num_queries=QUERIES, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
            encoder_attention_heads=2, decoder_attention_heads=2, d_model=16, dropout=0.0, num_labels=CLASSES - 1,
        )  # fmt: skip
        self.detector = DetrForObjectDetection(config)

    def forward(self, pixels: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> Found:
        found = self.detector(pixel_values=pixels)
        loss = F.cross_entropy(found.logits.transpose(1, 2), classes) + F.l1_loss(found.pred_boxes, boxes)
        return Found(loss, found.logits)


def detr_batch(random: np.random.Generator, size: int) -> Batch:
    return {
        "pixels": random.standard_normal((size, 3, SIDE, SIDE), dtype=np.float32),
        "classes": random.integers(0, CLASSES, (size, QUERIES)),
        "boxes": random.random((size, QUERIES, 4), dtype=np.float32),
    }


class Regions(nn.Module):
    """One region of each image, pooled to 2 x 2."""

    def __init__(self, aligned: bool) -> None:
        super().__init__()
        self.aligned = aligned
        self.features, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(24, 3)

    def forward(self, image: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(box.shape[0], dtype=box.dtype).unsqueeze(1)
        regions = torch.cat([numbers, box], 1)
        pooled = torchvision.ops.roi_align(self.features(image).tanh(), regions, 2, 0.5, 2, self.aligned)
        return self.head(pooled.flatten(1))


def regions_batch(random: np.random.Generator, size: int) -> Batch:
    corners = random.random((size, 2), dtype=np.float32) * 8
    return {
        "image": random.standard_normal((size, 3, 8, 8), dtype=np.float32),
        "box": np.concatenate([corners, corners + 1 + random.random((size, 2), dtype=np.float32) * 8], 1),
        "labels": random.standard_normal((size, 3), dtype=np.float32),
    }


class Flow(nn.Module):
    """A linear flow: minus the likelihood by `slogdet`, and the plain determinant of a small matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.small = nn.Parameter(torch.randn(12, 12)), nn.Linear(12, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        volume = torch.linalg.det(self.small(x).unflatten(1, (3, 3)))
        return (x @ self.mix).square().mean(1) - torch.linalg.slogdet(self.mix).logabsdet / 12 + volume.tanh()


class Rays(nn.Module):
    """Colours along a ray, weighted by what is left of its light; and a product over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 28)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alpha, colour = self.layer(x).sigmoid().chunk(2, 1)
        light = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)[:, :-1]
        return (light * alpha * colour).sum(1) + alpha.mean(1).cumprod(0)


def vectors(random: np.random.Generator, size: int) -> Batch:
    return {
        "x": random.standard_normal((size, 12), dtype=np.float32),
        "labels": random.standard_normal(size, dtype=np.float32),
    }


MSE = Regression(kind="mse")
CASES = [
    Case("detr", Detr, detr_batch, OutputLoss(kind="output", output="loss"), labels=("classes", "boxes")),
    Case("regions", lambda: Regions(True), regions_batch, MSE),
    Case("regions without the half pixel", lambda: Regions(False), regions_batch, MSE),
    Case("flow", Flow, vectors, MSE),
    Case("rays", Rays, vectors, MSE),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_follows_pytorch(case: Case, tmp_path: Path) -> None:
    assert [distance for distance in distances(case, tmp_path) if distance.wrong] == []
