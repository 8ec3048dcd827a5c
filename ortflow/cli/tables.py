"""What `ortflow data` prints of tables. Called by `ortflow.cli.data`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ortflow.workflow.errors import EXIT_USER
from ortflow.workflow.spec.locations import title_of

_LISTED = 20


def show_table(path: Path, as_json: bool) -> None:
    """Print a table's columns, classes and first rows."""
    from ortflow.workflow.data.tables.describe import describe_table

    shown = describe_table(path)
    if as_json:
        typer.echo(json.dumps(shown))
        return
    files = f" in {shown['files']} files" if shown["files"] > 1 else ""
    typer.echo(f"{title_of(path)}: {shown['format']}, {shown['rows']} rows{files}")
    for name, column in shown["columns"].items():
        typer.echo(f"  {name}: {_column(column)}")
    for number, row in enumerate(shown["first"]):
        typer.echo(f"  row {number}: {json.dumps(row, ensure_ascii=False)}")
    _list_bad(shown["bad"], shown["bad_rows"])


def verify_table(path: Path) -> None:
    """Read a table once and list its bad rows."""
    from ortflow.workflow.data.tables import describe

    rows, bad, bad_rows = describe.verify_table(path)
    typer.echo(f"{title_of(path)}: {rows} rows can be read, {bad} {'is' if bad == 1 else 'are'} bad")
    _list_bad(bad_rows, bad, len(bad_rows))
    if bad:
        raise typer.Exit(EXIT_USER)


def convert_table(path: Path, output: Path, shard_samples: int | None, force: bool) -> None:
    """Convert a table, and print what became of its columns and what the conversion gains."""
    from ortflow.workflow.data.tables import describe

    count, classes, omitted, (before, after) = describe.convert_table(
        path, output, shard_samples=shard_samples, replace=force
    )
    typer.echo(f"{output}: {count} samples")
    for name, names in classes.items():
        listed = ", ".join(f"{number} {text!r}" for number, text in enumerate(names[:_LISTED]))
        typer.echo(f"  {name}: {len(names)} classes: {listed}{', …' if len(names) > _LISTED else ''}")
    if classes:
        typer.echo(f"  all classes are in {describe.classes_beside(output)}")
    for name, reason in omitted.items():
        typer.echo(f"  {name} is left out: {reason}")
    typer.echo(f"  reading in random order: {after:,.0f} samples/s; from {path.name}: {before:,.0f}")


def _column(column: Mapping[str, Any]) -> str:
    parts = [column["kind"]]
    if column["minimum"] is not None:
        low, high = (end if isinstance(end, str) else f"{end:g}" for end in (column["minimum"], column["maximum"]))
        parts.append(f"{low} to {high}")
    if "mean" in column:
        parts.append(f"mean {column['mean']:.4g}")
    if "lengths" in column:
        shortest, longest = column["lengths"]
        parts.append(f"{shortest} to {longest} {'characters' if column['kind'] == 'text' else 'elements'}")
    if column["missing"]:
        parts.append(f"{column['missing']} missing")
    if column.get("not_numbers"):
        parts.append(f"{column['not_numbers']} NaN")
    if "most" in column:
        most = ", ".join(f"{name!r} {count}" for name, count in column["most"].items())
        rest = ", …" if column["different"] > len(column["most"]) else ""
        parts.append(f"{column['different']} different: {most}{rest}")
    return ", ".join(parts)


def _list_bad(bad_rows: list[str], bad: int, listed: int = _LISTED) -> None:
    for line in bad_rows[:listed]:
        typer.echo(f"  {line}")
    if bad > min(len(bad_rows), listed):
        typer.echo(f"  … and {bad - min(len(bad_rows), listed)} more bad rows")
