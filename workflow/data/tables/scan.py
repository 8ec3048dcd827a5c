"""One pass over the files of a text table: where its records are, which are bad, and the summary of each column.

The pass can continue where an earlier one was interrupted: it then comes to the same result.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ortflow.workflow.data.tables.parse import Dialect, json_faults, parse
from ortflow.workflow.data.tables.pieces import Mark, Piece, beginning, dialect_of, pieces
from ortflow.workflow.data.tables.records import Places
from ortflow.workflow.data.tables.summary import KINDS, Summary, kind_of, wider
from ortflow.workflow.errors import UserError

MOST_NAMED = 100
"""Bad rows that are named."""
_QUIET = 2.0
"""Seconds before progress is printed."""
_SAVED = 2.0
"""Seconds after which the result so far is saved."""
Append = Callable[[npt.NDArray[np.int64], npt.NDArray[np.uint32]], None]


@dataclass
class Scan:
    """What one pass over a table says."""

    dialect: Dialect
    columns: dict[str, Summary] = field(default_factory=dict)
    file_rows: list[int] = field(default_factory=list)
    """Good rows of each file."""
    rows: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    """The first bad rows, each as a sentence with file and line."""
    mark: Mark | None = None
    """How far the file behind those of `file_rows` is; None before it."""
    digest: str = ""
    """Hash of the content of the files of `file_rows`."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "columns": {name: summary.to_json() for name, summary in self.columns.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Scan:
        """The inverse of `to_json`. Raises KeyError or TypeError for other data."""
        dialect, mark = values["dialect"], values["mark"]
        return cls(**{
            **values,
            "dialect": Dialect(dialect["delimiter"], tuple(dialect["names"])),
            "columns": {name: Summary.from_json(of) for name, of in values["columns"].items()},
            "mark": None if mark is None else Mark(**mark),
        })  # fmt: skip


def scan(
    files: Sequence[Path],
    is_json: bool,
    types: Mapping[str, str],
    append: Append,
    note: Callable[[str], None] = lambda line: None,
    *,
    before: Scan | None = None,
    save: Callable[[Scan], None] = lambda result: None,
) -> Scan:
    """Read all files once.

    Parameters
    ----------
    files
        The files, in order. All CSV files have the same header.
    is_json
        JSON lines; else CSV.
    types
        Column or glob pattern -> `number` or `text`, as the run file states. Rows whose value is not a number are bad.
    append
        Called with the offsets and sizes, in bytes, of the good records of each piece.
    note
        Called with progress.
    before
        What an interrupted pass over the same files saved.
    save
        Called between pieces, from time to time; `append` has had all records that the result counts.

    Raises
    ------
    UserError
        If a file cannot be divided into records, naming the line.
    """
    dialect, _ = dialect_of(files[0], is_json)
    result = Scan(dialect) if before is None else before
    sizes = [file.stat().st_size for file in files]
    total, done = max(1, sum(sizes)), _done(result, sizes)
    began = noted = saved = time.monotonic()
    if done:
        note(f"indexing continues at {done / total:.0%}")
    # Values of JSON have types of their own: a field's other kind is a bad row.
    types = {name: kind for name in dialect.names if (kind := _stated(name, types)) is not None}
    for number, path in enumerate(files):
        file_dialect, start = dialect_of(path, is_json)
        if file_dialect != dialect:
            raise UserError(
                f"has the columns {', '.join(file_dialect.names)}, but {files[0].name} has {', '.join(dialect.names)}",
                where=str(path),
                fix="give files of one table",
            )
        if number < len(result.file_rows):
            continue
        if result.mark is None:
            result.mark = beginning(path, start, result.digest)
        for piece in pieces(path, dialect, result.mark, hashing=True):
            if len(piece.starts):
                good = _add(result, piece, path, types)
                append((piece.starts + piece.offset)[good], piece.sizes[good].astype(np.uint32))
            result.mark = piece.after
            if time.monotonic() - saved > _SAVED:
                save(result)
                saved = time.monotonic()
            if time.monotonic() - noted > _QUIET:
                noted = time.monotonic()
                now = _done(result, sizes)
                note(f"indexing {path.name}: {now / total:.0%}, {(now - done) / (noted - began) / 1e6:.0f} MB/s")
        result.digest, result.mark = result.mark.digest, None
        result.file_rows.append(result.rows - sum(result.file_rows))
    if any(summary.reread for summary in result.columns.values()):
        save(result)
    _read_text_again(result, files, types)
    return result


def _done(result: Scan, sizes: Sequence[int]) -> int:
    """Bytes that have been read."""
    return sum(sizes[: len(result.file_rows)]) + (result.mark.offset if result.mark is not None else 0)


def _stated(name: str, types: Mapping[str, str]) -> str | None:
    """The stated type of a column: that of the first pattern that names it."""
    return next(
        (kind for pattern, kind in types.items() if name == pattern or fnmatch.fnmatchcase(name, pattern)), None
    )


def _add(result: Scan, piece: Piece, path: Path, types: Mapping[str, str]) -> Places:
    """Add a piece to the summaries; the numbers of its good records."""
    table, faults = _table(result, piece, path, types)
    count = len(piece.starts)
    good = np.delete(np.arange(count), sorted(faults))
    if table.num_rows != len(good):
        raise UserError(
            f"has {len(good)} records in lines {piece.line_of(0)} to {piece.line_of(count - 1)}, of which "
            f"{table.num_rows} can be read",
            where=str(path),
            fix="correct the quotes and line ends of its fields",
        )
    table, wrong = _as_stated(table, types)
    for row, fault in sorted(wrong.items()):
        faults[int(good[row])] = fault
    for number in sorted(faults)[: max(0, MOST_NAMED - len(result.named))]:
        result.named.append(f"{path}, line {piece.line_of(number)}: {faults[number]}")
    result.bad += len(faults)
    good = np.delete(good, sorted(wrong))
    for name in table.column_names:
        if name not in result.columns:
            result.columns[name] = Summary()
            if result.rows:
                result.columns[name].add(pa.chunked_array([pa.nulls(result.rows)]))
    for name, summary in result.columns.items():
        present = name in table.column_names
        column = table.column(name) if present else pa.chunked_array([pa.nulls(len(good))])
        summary.add(column, from_text=not result.dialect.is_json)
    result.rows += len(good)
    return good


def _table(result: Scan, piece: Piece, path: Path, types: Mapping[str, str]) -> tuple[pa.Table, dict[int, str]]:
    kinds = {} if result.dialect.is_json else dict.fromkeys(types, "text")
    try:
        table, faults = parse(piece.data, result.dialect, kinds, sizes=piece.sizes)
        if not result.dialect.is_json or not _clashes(result, table):
            return table, faults
    except pa.ArrowInvalid as error:
        if not result.dialect.is_json:
            location = f"{path}, lines {piece.line_of(0)} to {piece.line_of(len(piece.starts) - 1)}"
            raise UserError(
                f"cannot be read ({_first_line(error)})", where=location, fix="correct these lines"
            ) from None
    lines = [piece.data[start:end] for start, end in zip(piece.starts.tolist(), piece.ends.tolist(), strict=True)]
    faults = json_faults(lines, {name: summary.kind for name, summary in result.columns.items()})
    good = np.delete(np.arange(len(lines)), sorted(faults))
    if not len(good):
        return pa.table({name: pa.nulls(0) for name in result.columns}), faults
    try:
        return parse(piece.records(good), result.dialect, {})[0], faults
    except pa.ArrowInvalid as error:
        location = f"{path}, lines {piece.line_of(0)} to {piece.line_of(len(lines) - 1)}"
        raise UserError(f"cannot be read ({_first_line(error)})", where=location, fix="correct these lines") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _clashes(result: Scan, table: pa.Table) -> bool:
    """Whether a field of JSON lines has another kind than before, which no kind holds both of."""
    for name in table.column_names:
        before, kind = result.columns.get(name, Summary()).kind, kind_of(table.schema.field(name).type)
        merged = wider(before, kind)
        # Times are text that all looks like times.
        if {before, kind} == {"time", "text"}:
            continue
        if "missing" not in (before, kind) and merged in ("text", "unsupported") and (before, kind) != (merged, merged):
            return True
    return False


def _as_stated(table: pa.Table, types: Mapping[str, str]) -> tuple[pa.Table, dict[int, str]]:
    """Columns of the type `number` as numbers, without the rows in which one is none."""
    faults: dict[int, str] = {}
    for name in [name for name, kind in types.items() if kind == "number" and name in table.column_names]:
        column = table.column(name)
        if kind_of(column.type) != "text":
            continue
        texts = pc.utf8_trim_whitespace(column)
        texts = pc.if_else(pc.is_in(texts, pa.array(_missing())), None, texts)
        try:
            numbers = texts.cast(pa.float64())
        except pa.ArrowInvalid:
            values = texts.to_pylist()
            wrong = {row for row, text in enumerate(values) if text is not None and _number(text) is None}
            faults |= {row: f"has {values[row]!r} as {name!r}, which is not a number" for row in sorted(wrong)}
            numbers = pa.chunked_array(
                [pa.array([None if text is None else _number(text) for text in values], pa.float64())]
            )
        table = table.set_column(table.column_names.index(name), name, numbers)
    if faults:
        table = table.filter(pa.array(np.isin(np.arange(table.num_rows), list(faults), invert=True)))
    return table, faults


def _number(text: str) -> float | None:
    """A number as Arrow reads it."""
    try:
        # Python's float also takes 1_000, and blanks around a number.
        number: float = pa.scalar(text).cast(pa.float64()).as_py()
    except pa.ArrowInvalid:
        return None
    return number


def _missing() -> list[str]:
    from pyarrow import csv

    names: list[str] = csv.ConvertOptions().null_values
    return names


def _read_text_again(result: Scan, files: Sequence[Path], types: Mapping[str, str]) -> None:
    """Summaries of columns whose first part looked like something else than text."""
    names = [name for name, summary in result.columns.items() if summary.reread]
    if not names:
        return
    again = {name: Summary("text") for name in names}
    for rows in _text_of(files, result.dialect, names, types):
        for name in names:
            again[name].add(rows.column(name))
    result.columns |= again


def _text_of(
    files: Sequence[Path], dialect: Dialect, names: Sequence[str], types: Mapping[str, str]
) -> Iterator[pa.Table]:
    """Columns of the good rows as they are written."""
    columns = [*names, *(name for name, kind in types.items() if kind == "number" and name not in names)]
    kinds = dict.fromkeys(columns, "text")
    # Which lines of JSON are bad depends on those before.
    replay = Scan(dialect)
    for path in files:
        for piece in pieces(path, dialect, beginning(path, dialect_of(path, dialect.is_json)[1], "")):
            if not len(piece.starts):
                continue
            if dialect.is_json:
                good = piece.records(_add(replay, piece, path, types))
                yield parse(good, dialect, kinds, columns)[0]
            else:
                yield _as_stated(parse(piece.data, dialect, kinds, columns, piece.sizes)[0], types)[0]


def text_kinds(columns: Mapping[str, Summary]) -> dict[str, str]:
    """The kinds as which the columns are read."""
    return {name: summary.kind for name, summary in columns.items() if summary.kind in KINDS}
