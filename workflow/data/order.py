"""The order in which an epoch visits the samples, determined by seed and epoch alone.

Called by the batches of every rank. The order does not depend on the machine, numpy's version or the world size,
because the permutation is implemented here: a Feistel network on positions, with cycle walking if the count is not a
power of two (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). Any part of any epoch can be computed on
its own, in memory proportional to that part. Must not use numpy.random, whose streams may change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_CHUNK = 1 << 14
"""Positions computed at a time: a step needs few, and numpy's cost per call is far above that of a few positions."""
_MASK = (1 << 64) - 1


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer (Steele, Lea & Flood 2014): each bit of the result depends on every bit of the input."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def _key(*numbers: int) -> int:
    """Combine several numbers, in order, to one 64-bit key."""
    word = 0
    for number in numbers:
        # An array of one element: numpy warns of the overflow of a scalar, not of an array.
        mixed = _mix(np.array([(word + number + 1) * 0x9E3779B97F4A7C15 & _MASK], dtype=np.uint64))
        word = int(mixed[0])
    return word


def permute(places: npt.NDArray[np.int64], size: int, key: Words | int) -> Indices:
    """Apply a bijection of [0, size) to `places`; `key` selects it: one for all positions, or one for each."""
    if size == 1:
        return places
    bits = (size - 1).bit_length()
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << (bits + 1) // 2) - 1)
    high_mask = np.uint64((1 << bits // 2) - 1)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), places.shape)
    result = places.astype(np.uint64)
    walking = np.arange(len(places))
    # A position outside [0, size) is permuted again until it is inside. Its cycle starts inside, so this ends.
    while len(walking):
        high, low = result[walking] >> low_bits, result[walking] & low_mask
        tweak = keys[walking]
        for number in range(0, _ROUNDS, 2):
            high = high ^ (_mix(low + tweak + np.uint64(number << 32)) & high_mask)
            low = low ^ (_mix(high + tweak + np.uint64((number + 1) << 32)) & low_mask)
        result[walking] = (high << low_bits) | low
        walking = walking[result[walking] >= size]
    return result.astype(np.int64)


class SampleOrder:
    """For each epoch a permutation of [0, count).

    Without `costs`: shuffled, or in stored order. With `costs` (one number per sample, such as its length): sorted and,
    if shuffled, divided into buckets of `bucket` neighbours, shuffled within each bucket, and the buckets shuffled.
    Samples of the same step then have similar costs. Costs need memory for one number per sample; otherwise none is
    needed.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        shuffle: bool = True,
        costs: npt.NDArray[np.generic] | None = None,
        bucket: int = 256,
    ) -> None:
        self.count = count
        self._seed, self._shuffle, self._bucket = seed, shuffle, bucket
        self._by_cost = None if costs is None else np.argsort(costs, kind="stable").astype(np.int64)
        self._window = (0, 0, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at positions [start, stop) of the epoch's order."""
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"places [{start}, {stop}) of an epoch of {self.count}")
        window_epoch, first, samples = self._window
        if window_epoch != epoch or start < first or stop > first + len(samples):
            first = start
            samples = self._samples(epoch, np.arange(start, min(max(stop, start + _CHUNK), self.count)))
            self._window = (epoch, first, samples)
        return samples[start - first : stop - first]

    def _samples(self, epoch: int, places: Indices) -> Indices:
        if self._by_cost is None:
            return permute(places, self.count, _key(self._seed, epoch)) if self._shuffle else places
        return self._by_cost[self._shuffled_buckets(epoch, places) if self._shuffle else places]

    def _shuffled_buckets(self, epoch: int, places: Indices) -> Indices:
        """Positions among the sorted samples: those of the bucket at that position, shuffled within the bucket."""
        size, count = self._bucket, self.count
        buckets = -(-count // size)
        order = permute(np.arange(buckets), buckets, _key(self._seed, epoch, 0))
        ends = np.cumsum(np.minimum(size, count - order * size))
        slots = np.searchsorted(ends, places, side="right")
        bucket_numbers = order[slots]
        within = places - np.concatenate([[0], ends])[slots]
        keys = _mix(bucket_numbers.astype(np.uint64) + np.uint64(_key(self._seed, epoch, 1)))
        result = np.empty_like(places)
        # The last bucket may be smaller, and a permutation has one size.
        for last, length in ((False, size), (True, count - (buckets - 1) * size)):
            of_size = (bucket_numbers == buckets - 1) == last
            if of_size.any():
                result[of_size] = permute(within[of_size], length, keys[of_size])
        return bucket_numbers * size + result
