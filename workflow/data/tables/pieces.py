"""Reads a CSV or a file of JSON lines once, in pieces of whole records. Memory is constant.

Called by the pass that indexes a table.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ortflow.workflow.data.tables.parse import Dialect
from ortflow.workflow.data.tables.records import Places, UnclosedError, blank, line_ends
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

PIECE = 16 << 20
"""Bytes read at a time."""
LONGEST_RECORD = 256 << 20
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Mark:
    """A place between two pieces, from which they continue as if they had not been interrupted."""

    offset: int
    """Where the next record begins."""
    read: int
    """Bytes of the file that have been read: what follows the records is a part of the next piece."""
    line: int
    digest: str
    """Hash of the bytes that have been read, and of the files before."""


@dataclass(frozen=True)
class Piece:
    """Whole records: record i is `data[starts[i]:ends[i]]`. `data` begins at `offset`, in line `line` of the file.

    A piece of empty lines has no record.
    """

    data: bytes
    offset: int
    line: int
    starts: Places
    ends: Places
    after: Mark

    @property
    def sizes(self) -> Places:
        """Size of each record in bytes."""
        return self.ends - self.starts

    def line_of(self, number: int) -> int:
        """The line of the file, from 1, in which a record begins."""
        return self.line + self.data.count(b"\n", 0, int(self.starts[number]))

    def records(self, good: Places) -> bytes:
        """Some of the records."""
        places = zip(self.starts[good].tolist(), self.ends[good].tolist(), strict=True)
        return b"".join(_ended(self.data[start:end]) for start, end in places)


def _ended(record: bytes) -> bytes:
    """A record with a line end, which the last one of a file may lack."""
    return record if record.endswith((b"\n", b"\r")) else record + b"\n"


def dialect_of(path: Path, is_json: bool) -> tuple[Dialect, int]:
    """How a file is written, and where its records begin: after the header of a CSV.

    Raises UserError if it has no header or an encoding other than UTF-8.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(1 << 20)
    if head.startswith(_UTF_16):
        raise UserError("is encoded as UTF-16", where=str(path), fix="save it as UTF-8")
    if b"\0" in head[:4096]:
        raise UserError("contains NUL bytes, so it is not text", where=str(path), fix="give the original file")
    start = len(_BOM) if head.startswith(_BOM) else 0
    if is_json:
        return Dialect(None), start
    while head[start : start + 1] in (b"\n", b"\r"):
        start += 1
    delimiter = "\t" if path.suffix.lower() in (".tsv", ".tab") else _delimiter(head[start:])
    ends = line_ends(head[start:], delimiter, last=False)
    if not len(ends) and start < len(head) < 1 << 20:
        ends = np.array([len(head) - start])
    if not len(ends):
        raise UserError("has no header line with the names of the columns", where=str(path), fix="add one")
    if head[start + ends[0] - 1 : start + ends[0] + 1] == b"\r\n":
        ends[0] += 1
    try:
        header = head[start : start + ends[0]].decode()
    except UnicodeDecodeError:
        raise UserError("has a header that is not UTF-8", where=str(path), fix="save it as UTF-8") from None
    names = tuple(name.strip() for name in next(csv.reader(io.StringIO(header, newline=""), delimiter=delimiter)))
    _check_names(names, path)
    return Dialect(delimiter, names), start + int(ends[0])


def _delimiter(head: bytes) -> str:
    line = head.splitlines()[0] if head else b""
    return max(",;\t|", key=lambda mark: line.count(mark.encode()))


def _check_names(names: tuple[str, ...], path: Path) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    location = f"{path}, line 1"
    if twice is not None:
        message = f"names the column {twice!r} twice" if twice else "has columns without a name"
        raise UserError(message, where=location, fix="give each column its own name")
    if all(_is_number(name) for name in names):
        raise UserError(
            "is a row of numbers, not the names of the columns", where=location, fix="add a line with names"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def beginning(path: Path, start: int, digest: str) -> Mark:
    """The mark of a file whose records begin at `start`; `digest` is that of the files before."""
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(start)
    return Mark(start, start, head.count(b"\n") + 1, _chained(digest, head))


def _chained(digest: str, data: bytes) -> str:
    """The hash of what was hashed before and of more. Its whole state are its digits, so that it can be continued."""
    return xxhash.xxh3_128_hexdigest(digest.encode() + xxhash.xxh3_128_digest(data))


def pieces(path: Path, dialect: Dialect, mark: Mark, *, hashing: bool = False) -> Iterator[Piece]:
    """All records of a file behind a mark in order; the next piece is read while one is used.

    Raises UserError for a quoted field without an end, naming its line.
    """
    with os.fdopen(open_regular(path), "rb") as file, ThreadPoolExecutor(1) as reader:
        file.seek(mark.offset)
        source = _pieces(file, path, dialect, mark, hashing)
        following = reader.submit(next, source, None)
        while (piece := following.result()) is not None:
            following = reader.submit(next, source, None)
            yield piece


def _pieces(file: io.BufferedReader, path: Path, dialect: Dialect, mark: Mark, hashing: bool) -> Iterator[Piece]:
    offset, line, read, digest = mark.offset, mark.line, mark.read, mark.digest
    rest, last = file.read(read - offset), False
    while not last:
        block = file.read(max(PIECE, len(rest)))
        last, read = not block, read + len(block)
        if hashing and block:
            digest = _chained(digest, block)
        data = rest + block
        try:
            ends = line_ends(data, dialect.delimiter, last)
        except UnclosedError as error:
            raise _unclosed(path, line + data.count(b"\n", 0, error.place)) from None
        # The line feed behind a return at the end of the piece may come with the next one.
        if not last and data.endswith(b"\r") and len(ends) and ends[-1] == len(data):
            ends = ends[:-1]
        if not len(ends):
            rest = data
            if len(data) > LONGEST_RECORD:
                raise _unclosed(path, line)
            continue
        size = int(ends[-1])
        starts = np.concatenate([[0], ends[:-1]])
        is_record = ~blank(data, starts, ends, dialect.is_json)
        after = Mark(offset + size, read, line + data.count(b"\n", 0, size), digest)
        yield Piece(data[:size], offset, line, starts[is_record], ends[is_record], after)
        offset, line, rest = after.offset, after.line, data[size:]


def _unclosed(path: Path, line: int) -> UserError:
    return UserError("begins a quoted field that has no end", where=f"{path}, line {line}", fix="correct the quotes")
