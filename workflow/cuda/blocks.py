"""Blocks of pixels as channels: convolutions of few channels and a stride as ones of more channels without. Pure.

With stride s, window j of an axis begins at pixel s j - pad. Pixels in blocks of s, with zeros in front so that windows
begin with a block, make it window j of a convolution with stride 1 of s times as many channels along each axis, whose
kernel has zeros where it is larger. A GPU multiplies few channels slowly: a patch embedding becomes one product of
matrices. Called by `images`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ortflow.workflow.cuda.windows import Windows

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
        before = _pair(-pad % size for pad, size in zip(windows.pads, block, strict=False))
        kernel = _pair(-(-(k + lead) // size) for k, lead, size in zip(windows.kernel, before, block, strict=True))
        # Products for each element of the result.
        costs = prod(kernel) * stored(channels, block), prod(windows.kernel) * stored(channels, (1, 1))
        whole: dict[str, object] = {"weight": [channels, *windows.kernel]}
        if windows.dilations != (1, 1) or costs[0] >= costs[1]:
            return cls((1, 1), {}, {}, dict(attributes), whole)
        counts = windows.counts(sizes)
        rows, columns = (count + k - 1 for count, k in zip(counts, kernel, strict=True))
        zeros = [pad + lead for pad, lead in zip(windows.pads, before, strict=False)]
        ones = {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}
        sized: dict[str, object] = {"block": list(block), "before": list(before)}
        return cls(
            block,
            {"block": list(block), "before": zeros, "sizes": [rows, columns]},
            {**sized, "sizes": list(kernel)},
            {**attributes, **ones, "kernel_shape": list(kernel)},
            {**sized, **whole},
        )


def _pair(numbers: Iterable[int]) -> Pair:
    first, second = numbers
    return first, second
