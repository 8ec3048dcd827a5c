"""Random numbers of one transform of one sample: a function of seed, epoch, the sample's number and the transform.

The streams are SplitMix64 (Steele, Lea & Flood 2014). Must not use numpy.random, whose streams may change between
versions.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


class Draws:
    """A stream of random numbers for a key of integers."""

    def __init__(self, *key: int) -> None:
        self._state = 0
        for number in key:
            self._state = _mix((self._state + number + 1) * _STEP & _MASK)

    def word(self) -> int:
        """64 random bits."""
        self._state = (self._state + _STEP) & _MASK
        return _mix(self._state)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """`count` times 64 random bits: the same as so many calls of `word`."""
        states = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(self._state)
        self._state = (self._state + count * _STEP) & _MASK
        states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words: npt.NDArray[np.uint64] = states ^ (states >> np.uint64(31))
        return words

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A number in [low, high)."""
        # 53 bits, as many as the mantissa of a double has: each number is exact, and none is rounded to 1.
        return low + (high - low) * ((self.word() >> 11) * 2.0**-53)

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Numbers in [0, 1)."""
        numbers: npt.NDArray[np.float64] = (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers

    def below(self, limit: int) -> int:
        """An integer in [0, limit). Its bias is below limit / 2**64."""
        return self.word() * limit >> 64

    def normals(self, count: int) -> npt.NDArray[np.float32]:
        """Numbers of mean 0 and variance 1: sums of twelve uniform ones, which are the same on every machine.

        Logarithms and cosines, as of the Box-Muller transform, are rounded differently by different processors.
        """
        parts = self.words(3 * count).view(np.uint16).reshape(count, 12).astype(np.int32).sum(axis=1)
        numbers: npt.NDArray[np.float32] = ((parts + 6) / 65536 - 6).astype(np.float32)
        return numbers

    def beta(self, parameter: float) -> float:
        """A number of the distribution Beta(parameter, parameter), parameter at most 1 (Jöhnk 1964)."""
        while True:
            first, second = (math.pow(self.uniform(), 1 / parameter) for _ in range(2))
            if 0 < first + second <= 1:
                return first / (first + second)
