"""Philox-4x32-10 and the masks of dropout in numpy: the reference for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key and words of `philox4x32 10` in Random123's file of known answers (kat_vectors)."""


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """The words uint32 [n, 4] of the counters uint32 [n, 4]."""
    a, b, c, d = (counter[:, place].astype(np.uint64) for place in range(4))
    low = np.uint64(0xFFFFFFFF)
    first, second = (np.uint64(word) for word in key)
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (two >> np.uint64(32)) ^ b ^ first, two & low, (one >> np.uint64(32)) ^ d ^ second, one & low
        first, second = (first + np.uint64(0x9E3779B9)) & low, (second + np.uint64(0xBB67AE85)) & low
    return np.stack([a, b, c, d], 1).astype(np.uint32)


def words(seed: int, number: int, count: int, start: int = 0) -> Array:
    """The random words of so many elements from element `start` on."""
    blocks = np.arange(start // 4, (start + count + 3) // 4 + 1, dtype=np.uint64)
    counter = np.zeros((len(blocks), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), number
    found = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).reshape(-1)
    return found[start % 4 :][:count]


def kept(seed: int, number: int, dropped: int, shape: tuple[int, ...]) -> Array:
    """Which elements a dropout keeps."""
    count = int(np.prod(shape, dtype=np.int64))
    return (words(seed, number, count) >= np.uint32(dropped)).reshape(shape)


def dropped(x: Array, seed: int, number: int, dropped: int, scale: float) -> Array:
    """What a dropout makes of fp32 values."""
    mask = kept(seed, number, dropped, x.shape)
    return np.where(mask, x * np.float32(scale), np.float32(0))
