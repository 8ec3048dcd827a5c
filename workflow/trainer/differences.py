"""Compares derivatives from a training graph with finite differences of the loss.

Pure arithmetic over two callbacks; called by `gradient_check`. A central difference of a loss in single precision has
two errors: truncation, estimated from two step sizes, and rounding, measured by moving the parameters by less than
their resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
Direction: TypeAlias = "Callable[[int, Tensor], Iterator[Vector]]"
"""From a tensor's index and the tensor to what is added to its values, in pieces of PIECE elements."""

RELATIVE_STEP = 1e-2
"""How far elements are moved, relative to their tensor's root mean square."""
SMALLEST_SCALE = 1e-2
"""Root mean square assumed for a tensor of zeros, such as an initial bias."""
LEVELS, SURE = 5, 2
"""Steps, each a quarter of the previous one, at which a disagreement must hold, and how many of them always count."""
USABLE = 0.3
"""Largest ratio of rounding to the last disagreement at which a smaller step is still informative."""
CONVERGED = 0.3
"""Largest difference of the slope from that of the previous step."""
TOLERANCE = 0.03
"""Tolerance of a derivative, beyond both errors."""
PIECE = 1 << 16
"""Elements that are computed together: a multiple of 8, small enough for the processor's cache."""
DIRECTIONS = 2
"""Number of random directions that must disagree before a tensor is named, or agree before it passes."""


@dataclass(frozen=True)
class Tensor:
    """A parameter: its values, in separate memory, and the gradient that the graph computes; both flat."""

    name: str
    values: Vector
    gradient: Vector

    @cached_property
    def length(self) -> float:
        """Distance by which the tensor is moved: its step per element, times the root of their number."""
        rms = norm(self.values) / math.sqrt(max(1, self.values.size))
        return RELATIVE_STEP * max(rms, SMALLEST_SCALE) * math.sqrt(self.values.size)

    @cached_property
    def slope(self) -> float:
        """Norm of the gradient."""
        return norm(self.gradient)

    def moved(self, by: Iterable[Vector], length: float) -> Vector:
        """The values plus a multiple of a direction."""
        values, start = np.empty_like(self.values), 0
        for piece in by:
            stop = start + piece.size
            np.multiply(piece, np.float32(length), out=piece)
            np.add(self.values[start:stop], piece, out=values[start:stop])
            start = stop
        return values

    def derivative(self, by: Iterable[Vector]) -> float:
        """The change of the loss along a direction that the gradient predicts."""
        total, start = 0.0, 0
        for piece in by:
            total += float(np.vdot(self.gradient[start : start + piece.size], piece))
            start += piece.size
        return total


@dataclass(frozen=True)
class Disagreement:
    """Finds tensors along which the gradient and the differences of the loss disagree."""

    names: tuple[str, ...]
    claimed: float
    measured: float


class Differences:
    """`loss(moved)` returns the loss with these values for the named tensors, and all others unchanged.

    With several ranks, each has a part of each tensor, and `total` is the sum of a number over them.
    """

    def __init__(
        self,
        loss: Callable[[Iterable[tuple[str, Vector]]], float],
        seed: int,
        total: Callable[[float], float] = lambda number: number,
    ) -> None:
        self._loss, self._seed, self._total = loss, seed, total
        self.evaluations = 0

    def _evaluate(self, tensors: Sequence[Tensor], direction: Direction, length: float) -> float:
        self.evaluations += 1
        return self._loss(
            (tensor.name, tensor.moved(direction(place, tensor), length)) for place, tensor in enumerate(tensors)
        )

    def rounding(self, tensors: Sequence[Tensor]) -> float:
        """Change of the loss when every parameter moves by less than its last bit."""

        def shake(place: int, tensor: Tensor) -> Iterator[Vector]:
            start = 0
            for piece in _signs((self._seed, place), tensor.values.size, 1e-7):
                piece *= tensor.values[start : start + piece.size]
                start += piece.size
                yield piece

        losses = [self._evaluate(tensors, shake, length) for length in (-1.0, 0.0, 1.0)]
        return max(max(losses) - min(losses), abs(losses[1]) * 2.0**-22)

    def check(self, tensors: Sequence[Tensor], rounding: float) -> Disagreement | None:
        """Compare along random directions through all the tensors, until DIRECTIONS of them say the same."""
        agreed, disagreed = 0, 0
        found: Disagreement | None = None
        while agreed < DIRECTIONS and disagreed < DIRECTIONS:
            direction = self._direction(agreed + disagreed, 1 / math.sqrt(len(tensors)))
            claimed = self._total(sum(t.derivative(direction(place, t)) for place, t in enumerate(tensors)))
            measured = self._contradicts(claimed, tensors, direction, rounding)
            if measured is None:
                agreed += 1
            else:
                disagreed += 1
                found = Disagreement(tuple(t.name for t in tensors), claimed, measured)
        return found if disagreed == DIRECTIONS else None

    def _contradicts(
        self, claimed: float, tensors: Sequence[Tensor], direction: Direction, rounding: float
    ) -> float | None:
        """The derivative by differences, if it contradicts the gradient at every step size that rounding leaves usable.

        The loss may be far from linear over the first step, so that only a smaller one shows its slope.
        """
        found, gap = 0.0, math.inf
        for level in range(LEVELS):
            measured, truncation, noise = self._measure(tensors, direction, 0.25**level, rounding)
            if level >= SURE and noise > USABLE * gap:
                break
            gap = abs(measured - claimed)
            if gap <= TOLERANCE * max(abs(measured), abs(claimed)) + truncation + noise or not math.isfinite(gap):
                return None
            if level and abs(measured - found) > CONVERGED * abs(measured) + noise:
                # Other steps would show no such slope: single precision cannot decide here.
                return None
            found = measured
        return found

    def _measure(
        self, tensors: Sequence[Tensor], direction: Direction, factor: float, rounding: float
    ) -> tuple[float, float, float]:
        """The derivative by central differences, its truncation error and its rounding error."""
        wide, narrow = factor, factor / 2
        at = {length: self._evaluate(tensors, direction, length) for length in (wide, -wide, narrow, -narrow)}
        coarse = (at[wide] - at[-wide]) / (2 * wide)
        fine = (at[narrow] - at[-narrow]) / (2 * narrow)
        return fine, 2 * abs(coarse - fine), 4 * rounding / narrow

    def _direction(self, draw: int, share: float) -> Direction:
        """A direction through each tensor, half along its gradient and half at random.

        A wrong gradient shows best along itself; missing terms show only in other directions.
        """

        def direction(place: int, tensor: Tensor) -> Iterator[Vector]:
            size, length = tensor.values.size, tensor.length * share
            both = math.sqrt(2) if tensor.slope > 0 else 1.0
            start = 0
            for piece in _signs((self._seed, draw, place), size, length / both / math.sqrt(max(1, size))):
                if tensor.slope > 0:
                    along = tensor.gradient[start : start + piece.size]
                    piece += along * np.float32(length / both / tensor.slope)
                start += piece.size
                yield piece

        return direction


_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
"""+1 or -1 for each bit of each byte."""


def _signs(seed: tuple[int, ...], size: int, factor: float) -> Iterator[Vector]:
    """+factor or -factor at random, in pieces. Generated again on each call, because they are as large as the
    parameters.
    """
    drawn = np.frombuffer(np.random.default_rng(seed).bytes(size // 8 + 1), np.uint8)
    of_bytes = _SIGNS * np.float32(factor)
    for start in range(0, size, PIECE):
        signs = np.take(of_bytes, drawn[start // 8 : (start + PIECE) // 8], axis=0)
        yield signs.reshape(-1)[: size - start]


def norm(values: Vector) -> float:
    """Root of the sum of squares."""
    return math.sqrt(float(np.vdot(values, values)))
