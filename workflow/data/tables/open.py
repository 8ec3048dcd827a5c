"""Opens tables as sets of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ortflow.workflow.data.locations import places_of
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.selected import selected
from ortflow.workflow.data.split import Mask, Values, column_of, held_out
from ortflow.workflow.data.tables.columnar import ColumnarTable
from ortflow.workflow.data.tables.fields import Source, fit
from ortflow.workflow.data.tables.files import TEXT, files_of
from ortflow.workflow.data.tables.samples import Table, TableSamples
from ortflow.workflow.data.tables.store import entry
from ortflow.workflow.data.tables.summary import NUMERIC, Summary
from ortflow.workflow.data.tables.text_column import TextSamples, windows_of
from ortflow.workflow.data.tables.text_table import TextTable
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.media import TextSection
from ortflow.workflow.spec.split import HeldOut

_LISTED = 20
"""Bad rows that an error lists."""


def open_table(section: DataSet, types: dict[str, str]) -> Table:
    """The table of a section's files. Raises UserError, naming the file."""
    files = [file for place in places_of(section) for file in files_of(place)]
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise UserError("no such file or folder", where=str(missing), fix="correct the path")
    odd = next((file for file in files if not file.is_file()), None)
    if odd is not None:
        raise UserError("is not a regular file", where=str(odd), fix="give a file")
    if len({file.suffix.lower() for file in files}) > 1:
        names = ", ".join(sorted({file.suffix for file in files}))
        raise UserError(f"names files of several formats ({names})", where=section.title, fix="give files of one table")
    return TextTable(files, types) if files[0].suffix.lower() in TEXT else ColumnarTable(files)


def open_samples_of_table(section: DataSet) -> Samples:
    """All samples of a section: rows, or windows over their text.

    Raises UserError, naming the file and the lines, if rows are bad.
    """
    table = _checked(open_table(section, _types(section)), section, "data.train")
    if section.text is not None and section.text.length is not None:
        return windows_of(Path(section.title), table, section.text)
    return _samples(section, table, fit(section.columns, section.fields, table.summaries), section.text)


def _samples(section: DataSet, table: Table, sources: Mapping[str, Source], text: TextSection | None) -> TableSamples:
    path = Path(section.title)
    return TableSamples(path, table, sources) if text is None else TextSamples(path, table, sources, text)


def open_part_of_table(data: DataSection, seed: int, *, evaluating: bool) -> Samples:
    """The training or the evaluation set of a run; what becomes of columns is fitted on the training set.

    Raises UserError, naming the file and the lines, if rows are bad and the section does not skip so many.
    """
    train, evaluation = data.train, data.eval
    if evaluating and evaluation is not None and evaluation.fraction is None:
        return open_other_table(evaluation, data, seed, "data.eval")
    table, mask, summaries = _training(data, seed)
    section, key_path = (evaluation, "data.eval") if evaluating and evaluation is not None else (train, "data.train")
    samples = _samples(section, table, fit(section.columns, train.fields, summaries, key_path), train.text)
    return samples if mask is None else selected(samples, np.flatnonzero(mask == evaluating))


def open_other_table(section: DataSet, data: DataSection, seed: int, key_path: str) -> TableSamples:
    """Another table than the training set, read with the classes, means and deviations of the training rows, and with
    their tokenizer unless it states one.

    Raises UserError, naming the file and the lines, if rows are bad and the section does not skip so many.
    """
    _, _, summaries = _training(data, seed)
    table = _checked(open_table(section, _types(data.train)), section, key_path)
    sources = fit(section.columns, data.train.fields, summaries, key_path)
    return _samples(section, table, sources, section.text or data.train.text)


def _training(data: DataSection, seed: int) -> tuple[Table, Mask | None, dict[str, Summary]]:
    """The training table, which of its rows are held out, and the summaries of the others."""
    table = _checked(open_table(data.train, _types(data.train)), data.train, "data.train")
    if data.eval is None or data.eval.fraction is None:
        return table, None, table.summaries
    mask = _split(table, data.eval, seed)
    return table, mask, _of_rows(table, data.train, ~mask, [data.eval.model_dump(), seed])


def _types(section: DataSet) -> dict[str, str]:
    """Pattern of columns -> stated type."""
    types: dict[str, str] = {}
    for rule in section.fields:
        for pattern in rule.columns:
            if rule.type is not None:
                types.setdefault(pattern, rule.type)
    return types


def _split(table: Table, section: HeldOut, seed: int) -> Mask:
    by = column_of(section)
    if by is None:
        return held_out(len(table), section, seed)
    key, name = by
    if name not in table.summaries:
        names = ", ".join(table.summaries)
        raise UserError(f"the table has no column {name!r}", where=f"data.eval.{key}", fix=f"choose of: {names}")
    column = pa.chunked_array([chunk for _, part in table.parts([name]) for chunk in part.column(name).chunks])
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise UserError(f"has no value for {name!r}", where=table.name_of(row), fix=f"split by another data.eval.{key}")
    values = column.unique()
    values = values.take(pc.sort_indices(values))
    codes = pc.index_in(column, value_set=values).to_numpy().astype(np.int64)
    return held_out(len(table), section, seed, Values(codes, [str(value) for value in values.to_pylist()]))


def _of_rows(table: Table, train: DataSet, mask: Mask, options: Any) -> dict[str, Summary]:
    """The summaries with the means and deviations of some rows. Classes remain those of the whole table."""
    names = [name for name, summary in table.summaries.items() if summary.kind in NUMERIC]
    if not names or not any(rule.standardize or rule.missing == "mean" for rule in train.fields):
        return table.summaries

    def build(folder: Path) -> dict[str, Any]:
        summaries = {name: Summary(classes=None) for name in names}
        for first, part in table.parts(names):
            rows = part.filter(pa.array(mask[first : first + part.num_rows]))
            for name, summary in summaries.items():
                summary.add(rows.column(name))
        return {name: [summary.mean, summary.squares, summary.present] for name, summary in summaries.items()}

    _, record = entry(table.files, ["rows", sorted(_types(train).items()), options], build)
    result = dict(table.summaries)
    for name, (mean, squares, present) in record.items():
        table_summary = table.summaries[name]
        # A deviation is per value: scaled to the number of values of the whole table, it remains the same.
        result[name] = replace(table_summary, mean=mean, squares=squares * table_summary.present / max(1, present))
    return result


def _checked(table: Table, section: DataSet, key_path: str) -> Table:
    total = len(table) + table.bad
    if table.bad and table.bad > section.bad_rows * total:
        raise Faults(_bad(table.bad_rows, table.bad, total, section.bad_rows, key_path))
    if not len(table):
        raise UserError("holds no row", where=section.title, fix="give a table with rows")
    return table


def _bad(bad_rows: Sequence[str], bad: int, total: int, allowed: float, key_path: str) -> list[UserError]:
    listed = [
        UserError(fault, where=place) for place, _, fault in (line.partition(": ") for line in bad_rows[:_LISTED])
    ]
    limit = f", more than the {allowed:.2%} that {key_path}.bad_rows allows" if allowed else ""
    fix = "correct them" + (
        f", or set {key_path}.bad_rows to the largest share to skip" if key_path != "--data" else ""
    )
    return [*listed, UserError(f"{bad} of {total} rows are bad{limit}", fix=fix)]
