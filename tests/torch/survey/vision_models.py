"""Image and video models of torchvision and timm: one of the smallest of each family, on small images."""

from __future__ import annotations

from functools import partial

import numpy as np
import timm
import torch
from case import Batch, Case
from torch import nn
from vision_families import CLASSES, IMAGES, SEGMENTATION, TIMM, VIDEO, Build

from ortflow.workflow.spec.model import CrossEntropy


class Logits(nn.Module):
    """A model of which only the first prediction is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes, …] of images [batch, channels, …]."""
        output = self.model(images)
        if isinstance(output, dict):
            return output["out"]
        return output[0] if isinstance(output, tuple) else output


def names() -> list[str]:
    """`library/family` of every image model."""
    return [f"torchvision/{n}" for n in (*IMAGES, *SEGMENTATION, *VIDEO)] + [f"timm/{n}" for n in TIMM]


def _batch(shape: tuple[int, ...], labels: tuple[int, ...], generator: np.random.Generator, size: int) -> Batch:
    images = generator.standard_normal((size, *shape), dtype=np.float32)
    return {"images": images, "labels": generator.integers(0, CLASSES, (size, *labels))}


def case(library: str, family: str) -> Case:
    """A case of the survey."""
    shape: tuple[int, ...]
    labels: tuple[int, ...] = ()
    build: Build
    if library == "timm":
        name, options, size = TIMM[family]
        build, shape = partial(timm.create_model, name, num_classes=CLASSES, **options), (3, size, size)
    elif family in VIDEO:
        build, frames, size = VIDEO[family]
        shape = (3, frames, size, size)
    elif family in SEGMENTATION:
        build, size = SEGMENTATION[family]
        shape, labels = (3, size, size), (size, size)
    else:
        build, size = IMAGES[family]
        shape = (3, size, size)
    loss = CrossEntropy(kind="cross_entropy", output="output", class_axis=1 if labels else -1)
    return Case(f"{library}/{family}", lambda: Logits(build()), partial(_batch, shape, labels), loss)
