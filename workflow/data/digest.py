"""A hash of a training set's samples, which detects that a run would continue with other samples.

Called by step `configure`. The hash does not depend on the division into shards and record batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ortflow.workflow.data.samples import Identified, Indices, Samples

WHOLE = 256 << 20
"""Sets up to this size, in bytes, are hashed as a whole; of larger ones, equally spaced samples of about that size."""
_AT_A_TIME = 4 << 20
"""Bytes hashed at a time."""


def digest_of(dataset: Samples, limit: int = WHOLE) -> str:
    """Return the hash as 32 hexadecimal digits."""
    if isinstance(dataset, Identified):
        return dataset.digest
    hashing = xxhash.xxh3_128()
    count = len(dataset)
    sizes = {name: _bytes(dataset, name) for name in dataset.columns}
    hashed = count if sum(sizes.values()) <= limit else min(count, max(2, count * limit // sum(sizes.values())))
    for name, column in sorted(dataset.columns.items()):
        hashing.update(f"{name} {column} {count}\n".encode())
        rows = max(1, _AT_A_TIME * count // max(1, sizes[name]))
        for start in range(0, hashed, rows):
            places = np.arange(start, min(start + rows, hashed), dtype=np.int64)
            indices = places if hashed == count else places * (count - 1) // (hashed - 1)
            for array in _read(dataset, name, indices):
                # xxhash takes contiguous memory alone.
                hashing.update(np.ascontiguousarray(array).data)
    return hashing.hexdigest()


def _bytes(dataset: Samples, name: str) -> int:
    column = dataset.columns[name]
    elements = dataset.lengths(name).sum() if column.variable else len(dataset) * np.prod(column.shape, dtype=np.int64)
    return int(elements) * column.dtype.itemsize


def _read(dataset: Samples, name: str, indices: Indices) -> list[npt.NDArray[Any]]:
    if not dataset.columns[name].variable:
        return [dataset.read(name, indices)]
    samples = dataset.read_ragged(name, indices)
    return [np.array([len(sample) for sample in samples], np.int64), *samples]
