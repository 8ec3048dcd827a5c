"""Reads and writes safetensors files tensor by tensor, in every element type, without a second copy in memory.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import replacing
from ortflow.workflow.system.files import open_regular
from ortflow.workflow.weights.table import STORED, Array

LONGEST_HEADER = 100_000_000
"""Bytes, as in safetensors' own library."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, which is read on access."""

    dtype: str
    """safetensors' name of its element type."""
    shape: tuple[int, ...]
    read: Callable[[], Array]
    """Elements as numpy stores them; BF16 as their bits, uint16."""


@dataclass(frozen=True)
class Contents:
    """A safetensors file."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def read_file(path: Path) -> Contents:
    """The tensors of a file. Raises UserError if it is not a valid safetensors file, OSError if it cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise _damaged(path, "its header is not complete")
        try:
            header = json.loads(file.read(length))
            metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
            tensors = {str(name): _stored(path, row, 8 + length, size) for name, row in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, str(error) or type(error).__name__) from None
    return Contents(tensors, metadata)


def _stored(path: Path, row: Mapping[str, Any], start: int, size: int) -> Stored:
    dtype, shape = str(row["dtype"]), tuple(int(dim) for dim in row["shape"])
    begin, end = (int(offset) for offset in row["data_offsets"])
    if dtype not in STORED:
        raise ValueError(f"it has elements of type {dtype}, which are not supported")
    expected = math.prod(shape) * np.dtype(STORED[dtype]).itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected or start + end > size:
        raise ValueError("a tensor lies outside the file")

    def read() -> Array:
        if not math.prod(shape):
            return np.empty(shape, STORED[dtype])
        return np.memmap(path, STORED[dtype], "r", start + begin, shape)

    return Stored(dtype, shape, read)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"is not a valid safetensors file ({reason})", where=str(path), fix="download or save it again")


def write_file(
    path: Path,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    read: Callable[[str], Array],
    metadata: Mapping[str, str],
) -> None:
    """Write a file, atomically: name, element type and shape of each tensor, and a function that returns its elements.

    Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * np.dtype(STORED[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    with replacing(path) as file:
        file.write(_head(header))
        for name, dtype, _ in tensors:
            file.write(np.ascontiguousarray(read(name), STORED[dtype]).tobytes())


def encoded(values: Iterable[tuple[str, str, Array]], metadata: Mapping[str, str]) -> bytes:
    """The file of tensors that are in memory: name, element type, elements."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = []
    end = 0
    for name, dtype, array in values:
        data.append(np.ascontiguousarray(array, STORED[dtype]).tobytes())
        start, end = end, end + len(data[-1])
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
    return _head(header) + b"".join(data)


def _head(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    # safetensors' own library pads the header to 8 bytes as well, so that tensors are aligned in a mapped file.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text
