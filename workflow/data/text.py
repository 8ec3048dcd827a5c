"""Text as byte tokens: windows of equal length, or lines.

Called by the conversions. Tokens are bytes, so text in any language has a vocabulary of 256.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from ortflow.workflow.data.schema import Array, Ragged
from ortflow.workflow.data.write import BATCH_BYTES
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular


def find_files(sources: Sequence[str]) -> list[Path]:
    """Files, all files below folders (except hidden ones), and glob patterns (`**` for any depth), sorted by name.

    Raises UserError for a source without files.
    """
    files: set[Path] = set()
    for source in sources:
        path = Path(source)
        if path.is_dir():
            matches = [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(name) for name in glob.glob(source, recursive=True)]
        matches = [file for file in matches if file.is_file()]
        if not matches:
            raise UserError("no such file, or no file in it", where=source, fix="give a file, a folder or a pattern")
        files.update(matches)
    return sorted(files)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def windows(files: Sequence[Path], length: int) -> Iterator[Array]:
    """Cut the concatenated bytes of the files into uint8 windows [n, length + 1] that begin `length` apart.

    Each byte is the target of one window: inputs are `window[:-1]`, targets `window[1:]`. The rest at the end is
    dropped.
    """
    rest = np.empty(0, np.uint8)
    for block in _blocks(files):
        data = np.concatenate([rest, block])
        count = (len(data) - 1) // length
        if count > 0:
            views = np.lib.stride_tricks.sliding_window_view(data, length + 1)
            yield np.ascontiguousarray(views[: count * length : length])
        rest = data[max(0, count) * length :]


def count_windows(files: Sequence[Path], length: int) -> int:
    """Number of windows that `windows` returns."""
    return max(0, (sum(file.stat().st_size for file in files) - 1) // length)


def _blocks(files: Sequence[Path]) -> Iterator[Array]:
    """The concatenated bytes of the files, BATCH_BYTES at a time."""
    block = bytearray()
    for path in files:
        with _opened(path) as file:
            while data := file.read(BATCH_BYTES - len(block)):
                block += data
                if len(block) == BATCH_BYTES:
                    # A copy: a bytearray that an array refers to cannot be cleared.
                    yield np.frombuffer(bytes(block), np.uint8)
                    block.clear()
    if block:
        yield np.frombuffer(bytes(block), np.uint8)


LONGEST_LINE = 1 << 24
"""Longest line in bytes; a longer one indicates another kind of file, or a sparse file."""


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), fix="check the source") from None


def lines(files: Sequence[Path]) -> Iterator[bytes]:
    """Every line with its newline, which is added to the last line of a file if necessary; empty lines are omitted."""
    for path in files:
        with _opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise UserError(f"has a line of more than {LONGEST_LINE >> 20} MiB", where=str(path))
                text = line.rstrip(b"\r\n")
                if text:
                    yield text + b"\n"


def count_lines(files: Sequence[Path]) -> int:
    """Number of lines that `lines` returns."""
    return sum(1 for _ in lines(files))


def line_chunks(files: Sequence[Path]) -> Iterator[Ragged]:
    """The lines as uint8 samples, grouped into record batches."""
    samples: list[bytes] = []
    size = 0
    for line in lines(files):
        samples.append(line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield _ragged(samples)
            samples, size = [], 0
    if samples:
        yield _ragged(samples)


def _ragged(samples: Sequence[bytes]) -> Ragged:
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Ragged(np.frombuffer(b"".join(samples), np.uint8), offsets)
