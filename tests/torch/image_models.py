"""Vision transformers and convolutional networks: from transformers' configurations, or written here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import transformers as hf
from case import Batch, Case
from torch import nn

from ortflow.workflow.spec.model import CrossEntropy

CLASSES = 10
SIDE = 16
LOSS = CrossEntropy(kind="cross_entropy", label_smoothing=0.1)
HF_LOSS = CrossEntropy(kind="cross_entropy", output="logits")


def vit() -> nn.Module:
    """A vision transformer of 4x4 patches."""
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.ViTConfig(**width, image_size=SIDE, patch_size=4, num_labels=CLASSES)
    return hf.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """ResNet: batch normalisation and shortcuts."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=CLASSES))


def convnext() -> nn.Module:
    """ConvNeXt: depth-wise convolutions, layer normalisation over channels, layer scale."""
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(**sizes, num_labels=CLASSES))


def efficientnet() -> nn.Module:
    """EfficientNet: inverted bottlenecks, squeeze and excitation, SiLU."""
    blocks = {"in_channels": [8, 8], "out_channels": [8, 8], "strides": [1, 2], "kernel_sizes": [3, 3]}
    more = {"num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": [], "hidden_dim": 320}
    scale = {"width_coefficient": 0.25, "depth_coefficient": 0.5, "dropout_rate": 0.0, "drop_connect_rate": 0.0}
    more |= {"initializer_range": 0.3}  # with the default, activations vanish in such a small network
    config = hf.EfficientNetConfig(**blocks, **more, **scale, image_size=SIDE, num_labels=CLASSES)
    return hf.EfficientNetForImageClassification(config)


class Fire(nn.Module):
    """SqueezeNet's module: squeeze, then expand by 1x1 and 3x3 convolutions side by side."""

    def __init__(self, width: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.expand1(x)), torch.relu(self.expand3(x))], 1)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1, two fires deep."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(16, 4, 8),
        Fire(16, 4, 12),
        nn.Dropout(0.0),
        nn.Conv2d(24, CLASSES, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class Gate(nn.Module):
    """Squeeze and excitation with a hard sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 2, 1), nn.Conv2d(width // 2, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * nn.functional.hardsigmoid(scale)


def mobilenet() -> nn.Module:
    """MobileNetV3's block: depth-wise convolution, hard swish, a gate."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8, eps=1e-3, momentum=0.01),
        nn.Hardswish(),
        nn.Conv2d(8, 16, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False),
        nn.BatchNorm2d(16),
        Gate(16),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def batchnorm() -> nn.Module:
    """Batch normalisation without weights, and without running statistics: batch statistics in evaluation, too."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, affine=False),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(8 * 49, CLASSES),
    )


def groupnorm() -> nn.Module:
    """Normalisations and activations that ONNX Runtime cannot differentiate but ONNX defines by other operators."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.Mish(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.InstanceNorm2d(8, affine=True),
        nn.CELU(0.7),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.SELU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 16),
        nn.Softsign(),
        nn.Linear(16, CLASSES),
        nn.LogSoftmax(-1),
    )


def _images(name: str):
    def draw(generator: np.random.Generator, size: int) -> Batch:
        images = generator.standard_normal((size, 3, SIDE, SIDE), dtype=np.float32)
        return {name: images, "labels": generator.integers(0, CLASSES, size)}

    return draw


def cases() -> Iterator[Case]:
    """One vision transformer, then convolutional networks."""
    # A key's bias adds the same to all scores of a query; what comes before batch statistics shifts only their mean.
    free = {
        vit: ("*.k_proj.bias",),
        efficientnet: ("*.project_bn.bias", "*.expand_bn.running_mean", "*.top_bn.running_mean"),
    }
    for build in (vit, resnet, convnext, efficientnet):
        yield Case(build.__name__, build, _images("pixel_values"), HF_LOSS, free=free.get(build, ()))
    for build in (squeezenet, mobilenet, batchnorm, groupnorm):
        yield Case(build.__name__, build, _images("input"), LOSS)
