"""The order in which an epoch visits the samples: that of ortflow's own runs with the same seed.

Called by `Sampler`. The permutation is that of `ortflow.workflow.data.order`, a Feistel network with cycle walking
(Black & Rogaway 2002), here without the need for numpy: any part of any epoch can be computed on its own. With numpy,
which most programs have, many positions are computed at a time, to the same result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_ROUNDS = 8
_MASK = (1 << 64) - 1
BUCKET = 256
"""Neighbours by length that are shuffled among each other."""


def _mix(word: int) -> int:
    """SplitMix64's finalizer (Steele, Lea & Flood 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def key_of(*numbers: int) -> int:
    """Combine several numbers, in order, to one 64-bit key."""
    word = 0
    for number in numbers:
        word = _mix((word + number + 1) * 0x9E3779B97F4A7C15 & _MASK)
    return word


def permute(places: Sequence[int], size: int, key: int) -> list[int]:
    """Apply the bijection of [0, size) that `key` selects to `places`."""
    if size == 1:
        return list(places)
    numpy = _numpy() if len(places) > 8 else None
    return _permute_together(numpy, places, size, key) if numpy else [_permute(place, size, key) for place in places]


def _permute(place: int, size: int, key: int) -> int:
    bits = (size - 1).bit_length()
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits // 2) - 1
    while True:
        high, low = place >> low_bits, place & low_mask
        for number in range(0, _ROUNDS, 2):
            high ^= _mix((low + key + (number << 32)) & _MASK) & high_mask
            low ^= _mix((high + key + ((number + 1) << 32)) & _MASK) & low_mask
        place = (high << low_bits) | low
        if place < size:
            return place


def _permute_together(numpy: Any, places: Sequence[int], size: int, key: int) -> list[int]:
    def mix(words: Any) -> Any:
        words = (words ^ (words >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> u64(27))) * u64(0x94D049BB133111EB)
        return words ^ (words >> u64(31))

    u64 = numpy.uint64
    bits = (size - 1).bit_length()
    low_bits, low_mask = u64((bits + 1) // 2), u64((1 << (bits + 1) // 2) - 1)
    high_mask = u64((1 << bits // 2) - 1)
    result = numpy.array(places, dtype=u64)
    walking = numpy.arange(len(result))
    while len(walking):
        high, low = result[walking] >> low_bits, result[walking] & low_mask
        for number in range(0, _ROUNDS, 2):
            high = high ^ (mix(low + u64((key + (number << 32)) & _MASK)) & high_mask)
            low = low ^ (mix(high + u64((key + ((number + 1) << 32)) & _MASK)) & low_mask)
        result[walking] = (high << low_bits) | low
        walking = walking[result[walking] >= size]
    indices: list[int] = result.tolist()
    return indices


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


class Order:
    """For each epoch a permutation of [0, count); with `lengths`, samples of similar length are neighbours.

    With `lengths`: sorted by length, divided into buckets, shuffled within each bucket, and the buckets shuffled.
    """

    def __init__(self, count: int, seed: int, lengths: Sequence[float] | None = None) -> None:
        self.count, self._seed = count, seed
        self._sorted = None if lengths is None else sorted(range(count), key=lengths.__getitem__)
        self._epoch: int | None = None
        self._buckets: list[int] = []
        self._ends: list[int] = []

    def samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the samples at positions [start, stop) of the epoch."""
        if self._sorted is None:
            return permute(range(start, stop), self.count, key_of(self._seed, epoch))
        return [self._sorted[place] for place in self._shuffled(epoch, start, stop)]

    def _shuffled(self, epoch: int, start: int, stop: int) -> list[int]:
        buckets = -(-self.count // BUCKET)
        if epoch != self._epoch:
            self._epoch = epoch
            self._buckets = permute(range(buckets), buckets, key_of(self._seed, epoch, 0))
            self._ends = list(accumulate(min(BUCKET, self.count - bucket * BUCKET) for bucket in self._buckets))
        places = []
        for place in range(start, stop):
            slot = bisect_right(self._ends, place)
            bucket = self._buckets[slot]
            size = min(BUCKET, self.count - bucket * BUCKET)
            key = _mix((bucket + key_of(self._seed, epoch, 1)) & _MASK)
            within = place - (self._ends[slot] - size)
            places.append(bucket * BUCKET + permute([within], size, key)[0])
        return places
