"""Samples of tokens: windows, documents, or packed documents. Their source is text files, or a table's column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ortflow.workflow.data.mapped_arrays import MappedArrays
from ortflow.workflow.data.samples import FixedColumns, Indices
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.media import TextSection

TOKENS = "tokens"
IGNORED = -100
"""Label of a position that has no target; the default of model.loss.ignore_index, and of PyTorch."""
MASK = "attention_mask"
_WINDOWS = 256
"""Windows read at a time."""


def samples_of(path: Path, tokens: Array, ends: Indices, text: TextSection) -> MappedArrays | Documents | Packed:
    """The samples of tokens [n] and the end of each document. Raises UserError without text for one window."""
    if not len(tokens):
        raise UserError("holds no text", where=str(path))
    if text.length is None:
        return Documents(path, tokens, ends)
    if text.pack:
        return Packed(path, tokens, ends, text.length)
    size = text.length + 1
    if len(tokens) < size:
        raise UserError(f"has {len(tokens)} tokens, fewer than a window of {size}", where=str(path), fix="lower length")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size)[:: text.length]
    return MappedArrays(path, [{TOKENS: windows}])


class Documents:
    """One sample of variable length for each document: columns `tokens`, and `attention_mask` of ones.

    A mask is padded with zeros where samples of a micro-batch differ in length.
    """

    has_ranges = True

    def __init__(self, path: Path, tokens: Array, ends: Indices) -> None:
        self.path, self._ragged = path, Ragged(tokens, np.concatenate([[0], ends]))
        span = (int(tokens.min()), int(tokens.max()))
        self.columns = {
            TOKENS: Column(tokens.dtype, (), True).with_range(span),
            MASK: Column(np.dtype(np.uint8), (), True).with_range((1, 1)),
        }
        self.shard_counts = [len(ends)]

    def __len__(self) -> int:
        return len(self._ragged)

    def read(self, name: str, indices: Indices) -> Array:
        """No column is of fixed size."""
        raise KeyError(name)

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """The tokens of documents, as views, or their masks."""
        documents = [self._ragged[number] for number in indices.tolist()]
        return documents if name == TOKENS else [np.ones(len(document), np.uint8) for document in documents]

    def lengths(self, name: str) -> Indices:
        """Tokens of each document."""
        return self._ragged.lengths

    def scan(self, name: str) -> Iterator[tuple[int, Ragged]]:
        """All documents."""
        # Takes one byte, whatever the number of tokens.
        ones = np.broadcast_to(np.uint8(1), self._ragged.values.shape)
        yield 0, self._ragged if name == TOKENS else Ragged(ones, self._ragged.offsets)


class Packed(FixedColumns):
    """Documents packed into windows of `length`, in order, each whole in one window if it fits into one.

    A longer document begins a window and continues in the next ones. Columns, each [length]: `tokens`; `labels`, the
    next token of the same document, or -100; `position_ids`, from 0 in each piece of a document; `document_ids`, from 1
    in each window, and 0 for padding; `attention_mask`, 1, and 0 for padding.
    """

    has_ranges = True

    def __init__(self, path: Path, tokens: Array, ends: Indices, length: int) -> None:
        self.path, self._tokens, self._ends, self._length = path, tokens, ends, length
        self._parts, self._starts = pieces(ends, length)
        self.shard_counts = [len(self)]
        largest = max(1, int(tokens.max()))
        window_column = Column(np.dtype(np.int64), (length,))
        self.columns = {
            TOKENS: Column(tokens.dtype, (length,)).with_range((0, largest)),
            "labels": window_column.with_range((IGNORED, largest)),
            "position_ids": window_column.with_range((0, length - 1)),
            "document_ids": window_column.with_range((0, length)),
            MASK: window_column.with_range((0, 1)),
        }

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, name: str, indices: Indices) -> Array:
        """One column of windows, [len(indices), length]."""
        empty = IGNORED if name == "labels" else 0
        windows = np.full((len(indices), self._length), empty, self.columns[name].dtype)
        for window, number in zip(windows, indices.tolist(), strict=True):
            parts = self._parts[self._starts[number] : self._starts[number + 1]].tolist()
            for order, (place, first, count, end) in enumerate(parts, 1):
                target = window[place : place + count]
                if name == TOKENS:
                    target[:] = self._tokens[first : first + count]
                elif name == "labels":
                    following = self._tokens[first + 1 : min(first + count + 1, end)]
                    target[: len(following)] = following
                elif name == "position_ids":
                    target[:] = np.arange(count)
                else:
                    target[:] = order if name == "document_ids" else 1
        return windows

    def scan(self, name: str) -> Iterator[tuple[int, Array]]:
        """A column in order, in parts."""
        for first in range(0, len(self), _WINDOWS):
            yield first, self.read(name, np.arange(first, min(first + _WINDOWS, len(self))))


def pieces(ends: Indices, length: int) -> tuple[Indices, Indices]:
    """The pieces of documents in each window: place in it, first token, tokens, and the document's end; and the first
    piece of each window, and of one more.
    """
    parts: list[tuple[int, int, int, int]] = []
    starts = [0]
    used = first = 0
    for end in ends.tolist():
        if used and used + end - first > length:
            starts.append(len(parts))
            used = 0
        while first < end:
            if used == length:
                starts.append(len(parts))
                used = 0
            count = min(end - first, length - used)
            parts.append((used, first, count, end))
            first, used = first + count, used + count
    return np.array(parts, np.int64).reshape(-1, 4), np.array([*starts, len(parts)], np.int64)
