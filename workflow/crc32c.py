"""CRC-32C (RFC 3309, appendix B) of many records at once, as TensorBoard's files have them. Pure.

tensorboardX computes one record's in Python, byte by byte: for the scalars of steps that were most of their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with its bits reversed."""


def _table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(POLYNOMIAL), table >> np.uint32(1))
    return table


_TABLE = _table()


def checksums(records: Sequence[bytes]) -> list[int]:
    """The checksum of each record. Those of equal length are computed together, a byte of each at a time."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        places[len(record)].append(place)
    sums = [0] * len(records)
    for length, group in places.items():
        data = np.frombuffer(b"".join(records[place] for place in group), np.uint8).reshape(len(group), length)
        crc = np.full(len(group), 0xFFFFFFFF, np.uint32)
        for column in np.ascontiguousarray(data.T):
            crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
        for place, value in zip(group, (~crc).tolist(), strict=True):
            sums[place] = value
    return sums
