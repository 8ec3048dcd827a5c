"""Blocks of pixels as channels: convolutions of few channels and a stride as ones of more channels without. Pure.

With stride s, window j of an axis begins at pixel s j of the padded image. In blocks of s pixels, that is window j of a
convolution with stride 1 and s times as many channels, whose kernel has zeros behind its last element. A GPU multiplies
few channels slowly: a patch embedding becomes one product of matrices. Called by `images`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ortflow.workflow.cuda.windows import AXES, Windows

PADDED = 8
"""Channels that are stored are a multiple of it, 16 bytes of halves; the last are zeros."""
Pair = tuple[int, int]


def stored(channels: int, block: Sequence[int]) -> int:
    """Channels of an image of blocks."""
    return -(-channels * prod(block) // PADDED) * PADDED


@dataclass(frozen=True)
class Blocks:
    """How an image of few channels, its weight and the windows change. Pairs are height and width."""

    block: Pair
    of_image: dict[str, object]
    """The attributes of ChannelsLast for the image."""
    of_weight: dict[str, object]
    """Those for the weight."""
    windows: dict[str, object]
    """The attributes of the convolution."""
    of_gradient: dict[str, object]
    """More attributes of ConvolutionWeightGrad: where the weight's elements are."""

    @classmethod
    def of(cls, channels: int, sizes: Pair, attributes: Mapping[str, Any]) -> Blocks:
        """For an image, and the attributes of the convolution; blocks of one pixel where larger ones gain nothing."""
        windows = Windows.of(attributes)
        block = windows.strides
        kernel = [-(-k // size) for k, size in zip(windows.kernel, block, strict=True)]
        # Products for each element of the result.
        costs = prod(kernel) * stored(channels, block), prod(windows.kernel) * stored(channels, (1, 1))
        pixels = cls.of_pixels(channels, attributes)
        if windows.dilations != (1, 1) or costs[0] >= costs[1]:
            return pixels
        counts = windows.counts(sizes)
        rows, columns = (count + k - 1 for count, k in zip(counts, kernel, strict=True))
        ones = {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}
        return cls(
            block,
            {"block": list(block), "before": list(windows.pads[:AXES]), "sizes": [rows, columns]},
            {"block": list(block), "sizes": kernel},
            {**attributes, **ones, "kernel_shape": kernel},
            {"block": list(block), **pixels.of_gradient},
        )

    @classmethod
    def of_pixels(cls, channels: int, attributes: Mapping[str, Any]) -> Blocks:
        """Blocks of one pixel: channels are only padded."""
        return cls((1, 1), {}, {}, dict(attributes), {"weight": [channels, *Windows.of(attributes).kernel]})
