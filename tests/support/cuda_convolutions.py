"""References of convolutions and their gradients in double precision, and cases to compare."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A convolution. `pads` are before and behind each of both axes: top, left, bottom, right."""

    samples: int = 4
    channels: int = 16
    outputs: int = 32
    sizes: tuple[int, int] = (14, 14)
    kernel: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (1, 1, 1, 1)
    group: int = 1

    def __str__(self) -> str:
        words = [f"{self.samples}x{self.channels}-{self.outputs}x{self.sizes[0]}x{self.sizes[1]}"]
        words.append(f"k{self.kernel[0]}{self.kernel[1]}s{self.strides[0]}{self.strides[1]}")
        words.append(f"d{self.dilations[0]}{self.dilations[1]}p{''.join(map(str, self.pads))}g{self.group}")
        return "-".join(words)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of windows along each axis."""
        first, second = (
            (size + before + behind - dilation * (kernel - 1) - 1) // stride + 1
            for size, before, behind, dilation, kernel, stride in zip(
                self.sizes, self.pads[:2], self.pads[2:], self.dilations, self.kernel, self.strides, strict=True
            )
        )
        return first, second

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the nodes, without the layout."""
        return {
            "group": self.group, "kernel_shape": self.kernel, "strides": self.strides, "dilations": self.dilations,
            "pads": self.pads,
        }  # fmt: skip

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of image, weight and result, channels first."""
        image = self.samples, self.channels, *self.sizes
        return image, (self.outputs, self.channels // self.group, *self.kernel), (
            self.samples, self.outputs, *self.counts,
        )  # fmt: skip


CASES = [
    Case(),
    Case(kernel=(1, 1), pads=(0,) * 4, channels=64, outputs=256),
    Case(kernel=(1, 1), pads=(0,) * 4, strides=(2, 2), channels=64, outputs=128),
    Case(kernel=(7, 7), pads=(3,) * 4, strides=(2, 2), channels=3, outputs=64, sizes=(32, 32)),
    Case(strides=(2, 2), channels=64, outputs=64, sizes=(28, 28)),
    Case(strides=(2, 2), sizes=(15, 13)),
    Case(dilations=(2, 2), pads=(2,) * 4),
    Case(dilations=(2, 1), strides=(1, 2), pads=(2, 1, 2, 1)),
    Case(kernel=(3, 1), pads=(1, 0, 1, 0), sizes=(9, 20)),
    Case(kernel=(5, 5), pads=(2,) * 4, channels=8, outputs=24),
    Case(kernel=(4, 4), strides=(4, 4), pads=(0,) * 4, channels=3, outputs=96, sizes=(32, 32)),
    Case(pads=(0,) * 4),
    Case(samples=1, channels=512, outputs=512, sizes=(7, 7)),
    Case(samples=33, channels=32, outputs=32, sizes=(28, 28)),
]
"""Those that every layout and element type supports."""
ODD = [
    Case(channels=5, outputs=7),
    Case(channels=1, outputs=6, kernel=(5, 5), pads=(0,) * 4, sizes=(28, 28)),
    Case(samples=1, channels=13, outputs=10, sizes=(11, 17), strides=(2, 3)),
]
GROUPED = [
    Case(group=4),
    Case(group=32, channels=128, outputs=128, sizes=(14, 14)),
    Case(group=32, channels=256, outputs=128, strides=(2, 2), sizes=(28, 28)),
    Case(group=2, channels=24, outputs=20, kernel=(5, 5), pads=(2,) * 4),
]
CASES_OF_FEW = [
    Case(kernel=(7, 7), pads=(3,) * 4, strides=(2, 2), channels=3, outputs=8, sizes=(32, 31)),
    Case(kernel=(3, 3), pads=(1,) * 4, strides=(2, 2), channels=3, outputs=16, sizes=(15, 18)),
    Case(kernel=(4, 4), pads=(0,) * 4, strides=(4, 4), channels=3, outputs=24, sizes=(32, 30)),
    Case(kernel=(16, 16), pads=(0,) * 4, strides=(16, 16), channels=3, outputs=8, sizes=(32, 48)),
    Case(kernel=(5, 7), pads=(2, 3, 2, 3), strides=(1, 4), channels=1, outputs=8, sizes=(9, 21)),
    Case(kernel=(11, 11), pads=(2,) * 4, strides=(4, 4), channels=3, outputs=16, sizes=(35, 40)),
    Case(kernel=(6, 6), pads=(1, 2, 1, 2), strides=(2, 3), channels=3, outputs=16, sizes=(17, 22)),
    Case(kernel=(3, 3), pads=(3, 6, 3, 6), strides=(3, 3), channels=7, outputs=8, sizes=(12, 10)),
]
"""Those of few channels that convolve in blocks of pixels."""


def _meetings(case: Case) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Each position of the kernel, and the elements of the padded image that it meets."""
    for place in itertools.product(*map(range, case.kernel)):
        first, second = (
            slice(at * dilation, at * dilation + (count - 1) * stride + 1, stride)
            for at, dilation, count, stride in zip(place, case.dilations, case.counts, case.strides, strict=True)
        )
        yield (place[0], place[1]), (first, second)


def _padded(case: Case, image: Array) -> Array:
    top, left, bottom, right = case.pads
    return np.pad(image.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))


def _by_group(case: Case, array: Array) -> Array:
    """The channels' axis as groups and channels of a group."""
    return array.reshape(array.shape[0], case.group, -1, *array.shape[2:])


def reference(case: Case, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
    """y, dx and dw, channels first."""
    padded = _by_group(case, _padded(case, x))
    grouped = w.astype(np.float64).reshape(case.group, case.outputs // case.group, *w.shape[1:])
    of_y = _by_group(case, dy.astype(np.float64))
    y, dx, dw = np.zeros(of_y.shape), np.zeros(padded.shape), np.zeros(grouped.shape)
    for place, met in _meetings(case):
        at = (..., *place)
        given = padded[(..., *met)]
        y += np.einsum("ngchw,gkc->ngkhw", given, grouped[at], optimize=True)
        dx[(..., *met)] += np.einsum("ngkhw,gkc->ngchw", of_y, grouped[at], optimize=True)
        dw[at] = np.einsum("ngkhw,ngchw->gkc", of_y, given, optimize=True)
    top, left = case.pads[:2]
    height, width = case.sizes
    dx = dx[..., top : top + height, left : left + width]
    return y.reshape(dy.shape), dx.reshape(x.shape), dw.reshape(w.shape)
