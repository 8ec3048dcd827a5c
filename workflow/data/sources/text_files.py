"""Text by a `tokenizer.json`: tokenised once into files of numbers, then windows, documents, or packed documents.

The tokens are kept in the user's cache by the content of the tokenizer and of the texts, so that the ranks of a machine
map one file, and later runs begin at once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ortflow.workflow.cache_folders import cache_folders
from ortflow.workflow.data.samples import FixedColumns, Indices
from ortflow.workflow.data.schema import Array, Column, Ragged
from ortflow.workflow.data.sources.folders import files_of, holds
from ortflow.workflow.data.sources.mapped import MappedArrays
from ortflow.workflow.errors import UserError
from ortflow.workflow.files import open_regular, read_whole
from ortflow.workflow.graph_hashes import hash_of
from ortflow.workflow.rundir import replacing
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import TextSection

TOKENS = "tokens"
IGNORED = -100
"""Label of a position that has no target; the default of model.loss.ignore_index, and of PyTorch."""
_VERSION = 1
_DOCUMENTS = 256
"""Documents tokenised at a time, by all cores."""
_LARGEST_TOKENIZER = 256 << 20


def matches(path: Path) -> bool:
    """Whether it is a text file, or a folder of them and nothing else: other sets have a README.txt."""
    return path.suffix.lower() == ".txt" or holds(path, ".txt", alone=True)


def open_text(section: DataSet, places: Sequence[Path]) -> MappedArrays | Documents | Packed:
    """The samples of texts, and of those of folders in the order of their names. Raises UserError."""
    path, text = Path(section.title), section.text
    if text is None:
        fix = "add text: {tokenizer: tokenizer.json, length: 1024}, or make bytes with `ortflow data convert --text`"
        raise UserError("is text, and how it becomes tokens is not given", where=str(path), fix=fix)
    if text.pack and text.length is None:
        raise UserError("packs windows, whose length is not given", where="text.pack", fix="set text.length")
    files = files_of(places, ".txt")
    tokens, ends = _tokens(files, text)
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
    """One sample of variable length for each document: column `tokens`."""

    has_ranges = True

    def __init__(self, path: Path, tokens: Array, ends: Indices) -> None:
        self.path, self._ragged = path, Ragged(tokens, np.concatenate([[0], ends]))
        span = (int(tokens.min()), int(tokens.max()))
        self.columns = {TOKENS: Column(tokens.dtype, (), True).with_range(span)}
        self.shard_counts = [len(ends)]

    def __len__(self) -> int:
        return len(self._ragged)

    def read(self, name: str, indices: Indices) -> Array:
        """No column is of fixed size."""
        raise KeyError(name)

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """The tokens of documents, as views."""
        return [self._ragged[number] for number in indices.tolist()]

    def lengths(self, name: str) -> Indices:
        """Tokens of each document."""
        return self._ragged.lengths

    def scan(self, name: str) -> Iterator[tuple[int, Ragged]]:
        """All documents."""
        yield 0, self._ragged


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
        whole = Column(np.dtype(np.int64), (length,))
        self.columns = {
            TOKENS: Column(tokens.dtype, (length,)).with_range((0, largest)),
            "labels": whole.with_range((IGNORED, largest)),
            "position_ids": whole.with_range((0, length - 1)),
            "document_ids": whole.with_range((0, length)),
            "attention_mask": whole.with_range((0, 1)),
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
                own = window[place : place + count]
                if name == TOKENS:
                    own[:] = self._tokens[first : first + count]
                elif name == "labels":
                    following = self._tokens[first + 1 : min(first + count + 1, end)]
                    own[: len(following)] = following
                elif name == "position_ids":
                    own[:] = np.arange(count)
                else:
                    own[:] = order if name == "document_ids" else 1
        return windows

    def scan(self, name: str) -> Iterator[tuple[int, Array]]:
        """A column in order, in parts."""
        for first in range(0, len(self), _DOCUMENTS):
            yield first, self.read(name, np.arange(first, min(first + _DOCUMENTS, len(self))))


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


def _tokens(files: Sequence[Path], text: TextSection) -> tuple[Array, Indices]:
    """All tokens, mapped from the cache, and the end of each document."""
    definition = _definition(text.tokenizer)
    hashing = xxhash.xxh3_128(json.dumps([_VERSION, text.documents, text.end]).encode())
    hashing.update(definition)
    for file in files:
        try:
            hashing.update(hash_of(file).encode())
        except OSError as error:
            raise UserError(error.strerror or str(error), where=str(file)) from None
    folder = next(cache_folders("tokens"), None)
    if folder is None:
        what = "the tokens cannot be kept: there is no folder for them"
        raise UserError(what, where=str(files[0]), fix="set ORTFLOW_CACHE to a folder that only you may write to")
    tokens, ends = folder / f"{hashing.hexdigest()}.tokens.npy", folder / f"{hashing.hexdigest()}.ends.npy"
    if not ends.exists() or not tokens.exists():
        _tokenise(files, text, definition, tokens, ends)
    try:
        return np.load(tokens, "r", allow_pickle=False), np.load(ends, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(tokens), fix="remove it") from None


def _tokenise(files: Sequence[Path], text: TextSection, definition: bytes, tokens: Path, ends: Path) -> None:
    tokenizer = _tokenizer(text.tokenizer, definition)
    end = None
    if text.end is not None:
        end = tokenizer.token_to_id(text.end)
        if end is None:
            raise UserError(f"has no token {text.end!r}", where=text.tokenizer, fix="correct text.end")
    kind: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    lengths: list[int] = []
    try:
        with tempfile.TemporaryFile(dir=tokens.parent) as file:
            for batch in _batches(files, text.documents):
                for encoding in tokenizer.encode_batch(batch):
                    ids = [*encoding.ids, *([] if end is None else [end])]
                    if ids:
                        lengths.append(len(ids))
                        file.write(np.array(ids, kind).tobytes())
            file.flush()
            total = sum(lengths)
            values = np.memmap(file, kind, "r", 0, total) if total else np.empty(0, kind)
            with replacing(tokens) as whole:
                np.save(whole, values)
        with replacing(ends) as whole:
            np.save(whole, np.cumsum(lengths, dtype=np.int64))
    except OSError as error:
        what = f"the tokens cannot be kept ({error.strerror or error})"
        raise UserError(what, where=str(tokens.parent), fix="set ORTFLOW_CACHE to a folder with room") from None


def _batches(files: Sequence[Path], documents: str) -> Iterator[list[str]]:
    batch: list[str] = []
    for file in files:
        for document in _documents(file, documents):
            batch.append(document)
            if len(batch) == _DOCUMENTS:
                yield batch
                batch = []
    if batch:
        yield batch


def _documents(file: Path, documents: str) -> Iterator[str]:
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            if documents == "files":
                yield _decoded(stream.read(), str(file))
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _decoded(line.rstrip(b"\r\n"), f"{file}:{number}")
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(file)) from None


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 ({error.reason})", where=where, fix="convert it, as `iconv -t utf-8`") from None


def _definition(path: str) -> bytes:
    try:
        return read_whole(path, _LARGEST_TOKENIZER)
    except OSError as error:
        raise UserError(error.strerror or str(error), where=path, fix="correct text.tokenizer") from None


def _tokenizer(path: str, definition: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("text needs tokenizers", fix="install it with: pip install 'ortflow[text]'") from None
    try:
        tokenizer = Tokenizer.from_buffer(definition)
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise UserError(f"is not a tokenizer.json ({error})", where=path, fix="save it with tokenizers") from None
    # Both would change documents without a word: length and pack do it here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
