"""The column of a table that is text, as tokens: beside the other columns, or in windows over all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import xxhash

from ortflow.workflow.data.documents import MASK, TOKENS, Documents, samples_of
from ortflow.workflow.data.samples import Indices, Samples
from ortflow.workflow.data.schema import Array, Ragged
from ortflow.workflow.data.tables.fields import Source
from ortflow.workflow.data.tables.samples import Table, TableSamples
from ortflow.workflow.data.tokenised import key_of, tokens_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.media import TextSection

COLUMN = "text"


class TextSamples(TableSamples):
    """Rows with further columns of variable length: `tokens`, and `attention_mask` of ones."""

    def __init__(self, path: Path, table: Table, sources: Mapping[str, Source], text: TextSection) -> None:
        super().__init__(path, table, sources)
        clashes = [name for name in (TOKENS, MASK) if name in table.summaries]
        if clashes:
            fix = "rename it in the file: columns of this name are made from the text"
            raise UserError(f"has a column {clashes[0]!r}", where=str(path), fix=fix)
        identity = _identity(table, text)
        self._key = key_of(text, identity)
        tokens, ends = tokens_of(text, identity, lambda: _documents(path, table, text), str(path))
        lengths = np.diff(ends, prepend=0)
        if not lengths.all():
            location = table.name_of(int(np.argmin(lengths)))
            raise UserError(f"has no token in {column_of(text)!r}", where=location, fix="remove the row")
        self._documents = Documents(path, tokens, ends)
        self.columns |= self._documents.columns

    @property
    def digest(self) -> str:
        """Hash of the table, of what becomes of its columns, and of the tokens."""
        return xxhash.xxh3_128_hexdigest(f"{super().digest} {self._key}".encode())

    def read_ragged(self, name: str, indices: Indices) -> list[Array]:
        """Samples of a variable-length column, one array each."""
        if name in (TOKENS, MASK):
            return self._documents.read_ragged(name, indices)
        return super().read_ragged(name, indices)

    def lengths(self, name: str) -> Indices:
        """Number of elements of every sample of a variable-length column, [len(self)]."""
        return self._documents.lengths(name) if name in (TOKENS, MASK) else super().lengths(name)

    def scan(self, name: str) -> Iterator[tuple[int, Array | Ragged]]:
        """A column in order, in parts, each with the number of its first sample."""
        return self._documents.scan(name) if name in (TOKENS, MASK) else super().scan(name)


def column_of(text: TextSection) -> str:
    """The column that has the text."""
    return text.column or COLUMN


def windows_of(path: Path, table: Table, text: TextSection) -> Samples:
    """Windows over all rows, as those of text files. Raises UserError."""
    tokens, ends = tokens_of(text, _identity(table, text), lambda: _documents(path, table, text), str(path))
    return samples_of(path, tokens, ends, text)


def _identity(table: Table, text: TextSection) -> list[str]:
    return [table.digest, str(table.bad), column_of(text)]


def _documents(path: Path, table: Table, text: TextSection) -> Iterator[str]:
    """The text of each row. Raises UserError for a row without one."""
    name = column_of(text)
    if text.documents != "lines":
        raise UserError(f"{path} is a table, whose rows are documents", where="text.documents", fix="remove it")
    summary = table.summaries.get(name)
    if summary is None:
        names = ", ".join(table.summaries)
        raise UserError(f"the table has no column {name!r}", where="text.column", fix=f"choose of: {names}")
    if summary.kind != "text":
        fix = f"name another column, or read it as text: fields: [{{columns: [{name}], type: text}}]"
        raise UserError(f"column {name!r} holds {summary.kind}, not text", where="text.column", fix=fix)
    for first, part in table.parts([name]):
        column = part.column(name)
        if column.null_count:
            location = table.name_of(first + pc.index(column.is_null(), True).as_py())
            raise UserError(f"has no value for {name!r}", where=location, fix="complete it, or remove the row")
        yield from column.to_pylist()
