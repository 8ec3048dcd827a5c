"""Compares derivatives from a training graph with finite differences of the loss.

Pure arithmetic over two callbacks; called by `difference_check`. A central difference of a loss in single precision has
two errors: truncation, estimated from two step sizes, and rounding. The loss is rounded to its own size, however small
its slope. A step at which this may exceed the tolerance, or the slope that was measured, says nothing; if too few steps
are left, single precision cannot decide.
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
"""Least root mean square that is assumed for a tensor."""
ZEROS, SCALE_OF_ZEROS = 1e-6, 0.1
"""Root mean square of a tensor that counts as zeros, which have no scale of their own, and the one assumed for it."""
NARROWER = (1.0, 0.25, 0.25**2, 0.25**3, 0.25**4)
"""Steps, relative to the first, at which a disagreement must hold, as far as rounding leaves them usable."""
SURE, SURE_OF_NONE = 2, 3
"""Steps that must show one and the same slope, or that must show none, before the gradient is wrong. A loss that bends
within the larger steps shows none at these, whatever its slope is."""
UNITS = 4
"""Least rounding error of a loss in units of RESOLUTION of its size; that of a difference counts as four times as much.
The largest that was measured, of sums over 30,000 classes, was 12 units."""
RESOLUTION = 2.0**-24
"""Half a unit in the last place of single precision, relative to the number."""
USABLE = 0.3
"""Largest ratio of rounding to a slope, and to its disagreement, at which a step shows another slope."""
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
        return RELATIVE_STEP * scale_of(self.values) * math.sqrt(self.values.size)

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


@dataclass(frozen=True)
class _Step:
    """The derivative by central differences, beside what the gradient predicts."""

    factor: float
    claimed: float
    measured: float
    truncation: float
    noise: float
    """Rounding error."""

    @property
    def gap(self) -> float:
        return abs(self.measured - self.claimed)

    @property
    def allowed(self) -> float:
        return TOLERANCE * max(abs(self.measured), abs(self.claimed))

    @property
    def shows_slope(self) -> bool:
        """Whether both the slope and the disagreement are more than rounding."""
        return self.noise <= USABLE * min(self.gap, abs(self.measured))

    @property
    def usable(self) -> bool:
        return self.noise <= self.allowed or self.shows_slope

    @property
    def agrees(self) -> bool:
        return self.gap <= self.allowed + self.truncation + self.noise

    def follows(self, wider: _Step) -> bool:
        """Whether the slope is that of a wider step."""
        return abs(self.measured - wider.measured) <= CONVERGED * abs(self.measured) + self.noise


class Undecided:
    """Single precision shows neither that the gradient is right nor that it is wrong."""


UNDECIDED = Undecided()
Verdict: TypeAlias = "Disagreement | Undecided | None"
"""None: the gradient and the differences agree."""


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
        return max(max(losses) - min(losses), abs(losses[1]) * UNITS * RESOLUTION)

    def check(self, tensors: Sequence[Tensor], rounding: float) -> Verdict:
        """Compare along random directions through all the tensors, until DIRECTIONS of them show a disagreement, or as
        many do not.
        """
        verdicts: list[Verdict] = []
        while True:
            disagreements = [verdict for verdict in verdicts if isinstance(verdict, Disagreement)]
            if len(disagreements) == DIRECTIONS:
                return disagreements[-1]
            if len(verdicts) - len(disagreements) == DIRECTIONS:
                return None if None in verdicts else UNDECIDED
            direction = self._direction(len(verdicts), 1 / math.sqrt(len(tensors)))
            verdicts.append(self._compare(tensors, direction, rounding))

    def _compare(self, tensors: Sequence[Tensor], direction: Direction, rounding: float) -> Verdict:
        """Compare along a direction, at every step that rounding leaves usable.

        The loss may be far from linear over the first step, so that only a smaller one shows its slope.
        """
        claimed = self._total(sum(t.derivative(direction(place, t)) for place, t in enumerate(tensors)))
        steps: list[_Step] = []
        for factor in NARROWER:
            step = self._measure(tensors, direction, factor, rounding, claimed)
            if not math.isfinite(step.gap):
                return UNDECIDED
            if not step.usable or (len(steps) >= SURE and step.noise > USABLE * steps[-1].gap):
                break
            if step.agrees:
                return None
            if steps and not step.follows(steps[-1]):
                # Other steps would show no such slope.
                return UNDECIDED
            steps.append(step)
        shown = [step for step in steps if step.shows_slope]
        if len(shown) >= SURE or len(steps) >= SURE_OF_NONE:
            return Disagreement(tuple(tensor.name for tensor in tensors), claimed, steps[-1].measured)
        return UNDECIDED

    def _measure(
        self, tensors: Sequence[Tensor], direction: Direction, factor: float, rounding: float, claimed: float
    ) -> _Step:
        wide, narrow = factor, factor / 2
        at = {length: self._evaluate(tensors, direction, length) for length in (wide, -wide, narrow, -narrow)}
        coarse = (at[wide] - at[-wide]) / (2 * wide)
        fine = (at[narrow] - at[-narrow]) / (2 * narrow)
        return _Step(factor, claimed, fine, 2 * abs(coarse - fine), 4 * rounding / narrow)

    def _direction(self, draw: int, share: float) -> Direction:
        """A direction through each tensor, half along its gradient and half at random.

        A wrong gradient shows best along itself; missing terms show only in other directions.
        """

        def direction(place: int, tensor: Tensor) -> Iterator[Vector]:
            size, length = tensor.values.size, tensor.length * share
            sum_norm = math.sqrt(2) if tensor.slope > 0 else 1.0
            start = 0
            for piece in _signs((self._seed, draw, place), size, length / sum_norm / math.sqrt(max(1, size))):
                if tensor.slope > 0:
                    along = tensor.gradient[start : start + piece.size]
                    piece += along * np.float32(length / sum_norm / tensor.slope)
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


def scale_of(values: Vector) -> float:
    """Root mean square of a tensor, or what is assumed in its place."""
    rms = norm(values) / math.sqrt(max(1, values.size))
    return max(rms if rms > ZEROS else SCALE_OF_ZEROS, SMALLEST_SCALE)
