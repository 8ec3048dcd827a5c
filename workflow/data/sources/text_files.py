"""Text files by a `tokenizer.json`, whose tokens `tokenised` makes once; `documents` has the samples of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ortflow.workflow.data.documents import Documents, Packed, samples_of
from ortflow.workflow.data.mapped_arrays import MappedArrays
from ortflow.workflow.data.sources.folders import files_of, holds
from ortflow.workflow.data.tokenised import tokens_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.system.files import open_regular


def matches(path: Path) -> bool:
    """Whether it is a text file, or a folder of them and nothing else: other sets have a README.txt."""
    return path.suffix.lower() == ".txt" or holds(path, ".txt", exclusive=True)


def open_text(section: DataSet, places: Sequence[Path]) -> MappedArrays | Documents | Packed:
    """The samples of texts, and of those of folders in the order of their names. Raises UserError."""
    path, text = Path(section.title), section.text
    if text is None:
        fix = "add text: {tokenizer: tokenizer.json, length: 1024}, or make bytes with `ortflow data convert --text`"
        raise UserError("is text, and how it becomes tokens is not given", where=str(path), fix=fix)
    if text.column is not None:
        raise UserError(f"is {text.column!r}, but {path} is not a table", where="text.column", fix="remove it")
    files = files_of(places, ".txt")
    try:
        identity = [text.documents, *(hash_of(file) for file in files)]
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(error.filename or path)) from None
    tokens, ends = tokens_of(text, identity, lambda: _all_documents(files, text.documents), str(path))
    return samples_of(path, tokens, ends[np.diff(ends, prepend=0) > 0], text)


def _all_documents(files: Sequence[Path], documents: str) -> Iterator[str]:
    return (document for file in files for document in _documents(file, documents))


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


def _decoded(data: bytes, location: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 ({error.reason})", where=location, fix="convert it, as `iconv -t utf-8`"
        ) from None
