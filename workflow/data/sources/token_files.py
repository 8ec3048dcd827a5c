"""Raw files of tokens as sets of samples: overlapping windows of the mapped files, without a copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ortflow.workflow.data.mapped_arrays import MappedArrays
from ortflow.workflow.data.schema import Array
from ortflow.workflow.data.sources.folders import files_of, holds
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import TokensSection
from ortflow.workflow.system.files import open_regular

TokenArray = MappedArrays
COLUMN = "tokens"


def matches(path: Path) -> bool:
    """Whether it is a `.bin` file, or a folder of them."""
    return path.suffix.lower() == ".bin" or holds(path, ".bin")


def open_tokens(section: DataSet, places: Sequence[Path]) -> TokenArray:
    """Windows of each file, and of each file of a folder in the order of their names. Raises UserError."""
    path = Path(section.title)
    if section.tokens is None:
        fix = "add tokens: {dtype: uint16, length: 1024} to the set, with the file's type"
        raise UserError("holds tokens of an unknown type", where=str(path), fix=fix)
    files = files_of(places, ".bin")
    return token_windows(path, [_mapped(file, section.tokens) for file in files], section.tokens)


def token_windows(path: Path, arrays: Sequence[Array], tokens: TokensSection) -> TokenArray:
    """Windows of one-dimensional arrays; none reaches from one array into another. Raises UserError."""
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            content = f"{array.dtype.name} of shape {list(array.shape)}"
            raise UserError(f"holds {content}, not one row of tokens", where=str(path), fix="remove tokens")
    if len({array.dtype for array in arrays}) > 1:
        raise UserError("holds arrays of different types", where=str(path), fix="save them with one type")
    size, stride = tokens.length + 1, tokens.stride or tokens.length
    parts = [
        {COLUMN: np.lib.stride_tricks.sliding_window_view(array, size)[::stride]}
        for array in arrays
        if len(array) >= size
    ]
    if not parts:
        longest = max(map(len, arrays))
        raise UserError(f"has {longest} tokens, fewer than a window of {size}", where=str(path), fix="lower length")
    return MappedArrays(path, parts)


def _mapped(file: Path, tokens: TokensSection) -> Array:
    dtype = np.dtype(tokens.dtype).newbyteorder("<")
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size - tokens.offset
            if size < 0 or size % dtype.itemsize:
                raise UserError(
                    f"has {max(size, 0)} bytes behind byte {tokens.offset}, not a multiple of the {dtype.itemsize} of "
                    f"{tokens.dtype}",
                    where=str(file),
                    fix="correct tokens.dtype or tokens.offset",
                )
            # mmap refuses a length of 0.
            if not size:
                return np.empty(0, dtype)
            # As a plain array: a slice of a memmap takes ten times as long (numpy 2.4: 7 us).
            mapped: Array = np.memmap(stream, dtype, "r", tokens.offset).view(np.ndarray)
            return mapped
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(file), fix="give a file of tokens") from None
