"""Records of CSV and JSON lines as Arrow tables, and what is wrong with those that do not fit. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ortflow.workflow.data.tables.summary import KINDS, kind_of, wider

_LINE_END = 2
"""Most bytes between two records."""


@dataclass(frozen=True)
class Dialect:
    """How a file is written: the delimiter of a CSV with the names of its columns; None for JSON lines."""

    delimiter: str | None
    names: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        """Whether it is JSON lines."""
        return self.delimiter is None


def parse(
    data: bytes,
    dialect: Dialect,
    kinds: Mapping[str, str],
    only: Sequence[str] | None = None,
    sizes: npt.NDArray[np.int64] | None = None,
) -> tuple[pa.Table, dict[int, str]]:
    """Parse whole records.

    Parameters
    ----------
    data
        The records.
    dialect
        How they are written.
    kinds
        Kinds of columns that are known; those of others are inferred from these records.
    only
        Columns to read; all if None.
    sizes
        Size of each record in bytes, if it is known: several cores are then used.

    Returns
    -------
    table, faults
        The rows that have the right number of fields, and what is wrong with each other one, by its number among them
        all.

    Raises
    ------
    ArrowInvalid
        If a value is not of the column's kind.
    """
    threads = sizes is not None
    if dialect.is_json:
        return _parse_json(data, kinds, only, threads), {}
    from pyarrow import csv

    faults: dict[int, str] = {}

    def collect(row: csv.InvalidRow) -> str:
        number = len(faults) if row.number is None else row.number - 1
        fields = "1 field" if row.actual_columns == 1 else f"{row.actual_columns} fields"
        faults[number] = f"has {fields}, and the header has {row.expected_columns}"
        return "skip"

    # pyarrow refuses a record that is longer than a block.
    block = max(len(data), 1) + 1 if sizes is None else max(1 << 20, int(sizes.max(initial=0)) + _LINE_END)
    # pyarrow divides text into blocks faster if it may assume that each line feed ends a record.
    lines = b'"' not in data or (sizes is not None and data.count(b"\n") <= len(sizes))
    table = csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(column_names=list(dialect.names), use_threads=threads, block_size=block),
        parse_options=csv.ParseOptions(
            delimiter=dialect.delimiter, newlines_in_values=not lines, invalid_row_handler=collect
        ),
        convert_options=csv.ConvertOptions(
            column_types={name: KINDS[kind] for name, kind in kinds.items() if kind in KINDS},
            include_columns=None if only is None else list(only),
        ),
    )
    # The numbers of rows are only known to a single thread.
    return parse(data, dialect, kinds, only) if faults and threads else (table, faults)


def _parse_json(data: bytes, kinds: Mapping[str, str], only: Sequence[str] | None, threads: bool) -> pa.Table:
    from pyarrow import json as reader

    fixed = {name: KINDS[kind] for name, kind in kinds.items() if kind in KINDS and (only is None or name in only)}
    schema = pa.schema(list(fixed.items())) if fixed else None
    table = reader.read_json(
        pa.BufferReader(data),
        read_options=reader.ReadOptions(use_threads=threads, block_size=max(len(data), 1) + 1),
        parse_options=reader.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if only is None else "ignore"
        ),
    )
    return table if only is None else table.select([name for name in only if name in table.column_names])


def json_faults(lines: Sequence[bytes], kinds: Mapping[str, str]) -> dict[int, str]:
    """What is wrong with lines of JSON, by number: no object, or a field of another kind than in `kinds` or before."""
    column_kinds, faults = dict(kinds), {}
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                faults[number] = "is not an object"
                continue
            line_kinds = {
                name: wider(column_kinds.get(name, "missing"), _json_kind(value)) for name, value in record.items()
            }
            other = next(
                (name for name, kind in line_kinds.items() if _differs(column_kinds.get(name), kind, record[name])),
                None,
            )
            if other is not None:
                kind = column_kinds[other].replace("unsupported", "a structure")
                raise ValueError(f"has {record[other]!r} as {other!r}, which is {kind} in other lines")
            column_kinds |= line_kinds
        except (ValueError, RecursionError) as error:
            faults[number] = f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
    return faults


def _differs(before: str | None, merged: str, value: Any) -> bool:
    """Whether a value changes its column into text or a structure, which pyarrow refuses within a file."""
    # Times are text that all looks like times.
    if before == "time" and isinstance(value, str):
        return False
    if before == "unsupported" and value is not None and not isinstance(value, (dict, list)):
        return True
    return before not in (None, "missing", merged) and merged in ("text", "unsupported") and value is not None


def _json_kind(value: Any) -> str:
    if isinstance(value, (dict, tuple)):
        return "unsupported"
    if isinstance(value, int) and value.bit_length() > 63:  # as pyarrow reads it in a file
        return "number"
    try:
        return kind_of(pa.array([value]).type)
    except (pa.ArrowException, OverflowError):
        return "unsupported"
