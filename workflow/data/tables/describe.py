"""A table as plain data, for `ortflow data show` and `ortflow data verify`, and its conversion to a set of samples."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.samples import Samples, part_of
from ortflow.workflow.data.schema import Array, Ragged
from ortflow.workflow.data.tables.fields import fit
from ortflow.workflow.data.tables.open import open_table
from ortflow.workflow.data.tables.samples import Table, TableSamples
from ortflow.workflow.data.tables.summary import DATED, KINDS, Summary
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.data import DataSet

_MOST_CLASSES = 10
"""Classes that are listed, the most frequent first."""
_ROWS = 3
_TRIAL_ROWS = 512
_TRIAL_SECONDS = 0.2


def describe_table(path: Path) -> dict[str, Any]:
    """A table's rows and columns: kinds, missing values, ranges, classes and the first rows. Raises UserError."""
    table = open_table(DataSet(path=str(path)), {})
    shown = table.take(np.arange(min(_ROWS, len(table))), _readable(table)) if len(table) else None
    return {
        "format": table.format,
        "rows": len(table),
        "files": len(table.files),
        "bad_rows": table.bad,
        "bad": list(table.bad_rows),
        "columns": {name: _column(summary) for name, summary in table.summaries.items()},
        "first": [] if shown is None else [{k: _plain(v) for k, v in row.items()} for row in shown.to_pylist()],
    }


def verify_table(path: Path) -> tuple[int, int, list[str]]:
    """Read every row of a table once: rows that fit, bad rows, and the first of these with file and line."""
    table = open_table(DataSet(path=str(path)), {})
    rows = sum(part.num_rows for _, part in table.parts(_readable(table))) if _readable(table) else len(table)
    return rows, table.bad, list(table.bad_rows)


def convert_table(
    path: Path, output: Path, *, shard_samples: int | None, replace: bool
) -> tuple[int, dict[str, list[str]], dict[str, str], tuple[float, float]]:
    """Convert the columns that can become numbers.

    Returns the number of samples; the classes of each text column, by number; each other column with the reason why it
    is left out; and the samples that are read a second in random order before and after.

    Raises UserError, naming the file and the line, for bad rows.
    """
    table = open_table(DataSet(path=str(path)), {})
    if table.bad:
        location, _, message = table.bad_rows[0].partition(": ")
        raise UserError(
            message, where=location, fix=f"correct all {table.bad} bad rows, which `ortflow data verify` lists"
        )
    samples = TableSamples(path, table, fit({}, (), table.summaries))
    faults = {name: samples.fault_of(name) for name in table.summaries}
    names = [name for name, fault in faults.items() if fault is None]
    if not names:
        raise UserError("has no column that can be converted", where=str(path))
    batches = (record_batch(chunk) for chunk in _chunks(samples, names))
    count = write_set(output, batches, shard_samples=shard_samples, replace=replace)
    classes = {name: class_names for name, class_names in samples.classes.items() if name in names}
    if classes:
        write_atomically(classes_beside(output), (json.dumps(classes, indent=2, ensure_ascii=False) + "\n").encode())
    reasons = {name: fault.what for name, fault in faults.items() if fault is not None}
    return count, classes, reasons, (_speed(samples, names), _speed(Dataset.open(output), names))


def classes_beside(output: Path) -> Path:
    """The file with the classes of a converted table's text columns."""
    return output.with_name(f"{output.stem}.classes.json")


def _chunks(samples: TableSamples, names: list[str]) -> Iterator[dict[str, Array | Ragged]]:
    size = 1 << 16
    for first in range(0, len(samples), size):
        rows = np.arange(first, min(first + size, len(samples)))
        yield {name: part_of(samples, name, rows) for name in names}


def _speed(samples: Samples, names: list[str]) -> float:
    """Samples a second, read in random order."""
    random, count, began = np.random.default_rng(0), 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < _TRIAL_SECONDS or not count:
        rows = random.integers(0, len(samples), min(_TRIAL_ROWS, len(samples)))
        for name in names:
            if samples.columns[name].variable:
                samples.read_ragged(name, rows)
            else:
                samples.read(name, rows)
        count += len(rows)
    return count / max(seconds, 1e-9)


def _readable(table: Table) -> list[str]:
    return [name for name, summary in table.summaries.items() if summary.kind not in ("unsupported", "missing")]


def _column(summary: Summary) -> dict[str, Any]:
    numeric = summary.kind in ("boolean", "integer", "number", "integers", "numbers")
    shown = {"kind": summary.kind, "missing": summary.missing, "minimum": summary.minimum, "maximum": summary.maximum}
    if numeric and summary.minimum is not None:
        shown |= {"mean": summary.mean, "not_numbers": summary.not_numbers}
        if summary.kind in ("boolean", "integer", "number"):
            shown["deviation"] = summary.deviation
    if summary.kind in DATED:
        shown |= {"minimum": _dated(summary.minimum, summary.kind), "maximum": _dated(summary.maximum, summary.kind)}
    if summary.shortest is not None:
        shown["lengths"] = [summary.shortest, summary.longest]
    if summary.classes and (summary.kind in ("text", "boolean") or len(summary.classes) <= _MOST_CLASSES):
        most = sorted(summary.classes.items(), key=lambda item: -item[1])[:_MOST_CLASSES]
        shown |= {"different": len(summary.classes), "most": dict(most)}
    return shown


def _dated(end: float | None, kind: str) -> str | None:
    """A summary's number of days or microseconds as a date or time."""
    if end is None:
        return None
    return str(pa.scalar(int(end), pa.int32() if kind == "date" else pa.int64()).cast(KINDS[kind]).as_py())


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)
