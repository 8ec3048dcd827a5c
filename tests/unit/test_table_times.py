"""Dates and times of tables as people write them: with offsets, fractions, and among other text."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.data.tables import pieces
from ortflow.workflow.data.tables.describe import describe_table
from ortflow.workflow.data.tables.samples import TableSamples
from ortflow.workflow.spec.data import DataSet

UNIX = 1704448800
"""2024-01-05 10:00:00 UTC."""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(pieces, "PIECE", 256)


def opened(path: Path, **section: Any) -> TableSamples:
    samples = open_samples(DataSet.model_validate({"path": str(path), **section}))
    assert isinstance(samples, TableSamples)
    return samples


def table(path: Path, values: list[str]) -> Path:
    path.write_text("when,number\n" + "".join(f"{value},1\n" for value in values))
    return path


def kind_and_values(path: Path) -> tuple[str, list[Any]]:
    rows = opened(path).table
    return rows.summaries["when"].kind, rows.take(np.arange(len(rows)), ["when"]).column("when").to_pylist()


@pytest.mark.parametrize("text", ["2024-01-05 12:00:00+02:00", "2024-01-05T10:00:00Z", "2024-01-05T10:00:00.000+00:00"])
def test_times_with_an_offset_are_counted_in_utc(text: str, tmp_path: Path) -> None:
    samples = opened(table(tmp_path / "t.csv", [text] * 40), fields=[{"columns": ["when"], "unit": "seconds"}])
    assert samples.table.summaries["when"].kind == "zoned time"
    assert set(samples.read("when", np.arange(40)).tolist()) == {UNIX}


@pytest.mark.parametrize("other", ["2024-01-05 10:00:00", "2024-01-05"])
def test_times_with_and_without_an_offset_are_text(other: str, tmp_path: Path) -> None:
    texts = ["2024-01-05 12:00:00+02:00"] * 40 + [other] * 40
    assert kind_and_values(table(tmp_path / "t.csv", texts)) == ("text", texts)


def test_nanoseconds_are_text_rather_than_cut(tmp_path: Path) -> None:
    texts = ["2024-01-05 10:00:00.123456"] * 40 + ["2024-01-05 10:00:00.123456789"]
    assert kind_and_values(table(tmp_path / "t.csv", texts)) == ("text", texts)
    kind, values = kind_and_values(table(tmp_path / "u.csv", texts[:40]))
    assert kind == "time"
    assert set(values) == {datetime.datetime(2024, 1, 5, 10, 0, 0, 123456)}


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["2024-01-05"] * 30 + ["2024-02-01"], ("2024-01-05", "2024-02-01")),
        (["2024-01-05"] * 30 + ["2024-01-06 10:00:00"] * 30, ("2024-01-05 00:00:00", "2024-01-06 10:00:00")),
        (
            ["2024-01-05 10:00:00"] * 30 + ["2024-01-05 09:00:00.5"] * 30,
            ("2024-01-05 09:00:00.500000", "2024-01-05 10:00:00"),
        ),
        (["2024-01-05 10:00:00+01:00"] * 3, ("2024-01-05 09:00:00+00:00", "2024-01-05 09:00:00+00:00")),
    ],
)  # fmt: skip
def test_the_first_and_the_last_are_shown_as_dates(texts: list[str], ends: tuple[str, str], tmp_path: Path) -> None:
    column = describe_table(table(tmp_path / "t.csv", texts))["columns"]["when"]
    assert (column["minimum"], column["maximum"]) == ends


def test_a_bad_line_of_json_makes_no_date_beside_it_bad(tmp_path: Path) -> None:
    lines = [json.dumps({"when": f"2024-01-{1 + number % 28:02}", "number": number}) for number in range(40)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([*lines[:30], "{broken", *lines[30:]]) + "\n")
    samples = opened(path, bad_rows=0.05)
    assert samples.table.bad == 1
    assert samples.table.bad_rows[0].startswith(f"{path}, line 31: is not JSON")
    assert samples.read("number", np.arange(40)).tolist() == list(range(40))
    assert samples.table.summaries["when"].kind == "time"


def test_text_among_the_dates_of_json_is_text_with_all_rows_as_written(tmp_path: Path) -> None:
    texts = [f"2024-01-{1 + number % 28:02}" for number in range(40)] + ["soon"] + ["2024-01-05"] * 20
    lines = [json.dumps({"when": text, "number": 1}) for text in texts]
    lines[35:35] = ["[]", json.dumps({"when": 7, "number": 1})]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    samples = opened(path, bad_rows=0.05)
    assert [line.partition(": ")[2] for line in samples.table.bad_rows] == [
        "is not an object", "has 7 as 'when', which is time in other lines",
    ]  # fmt: skip
    rows = samples.table.take(np.arange(len(texts)), ["when"]).column("when").to_pylist()
    assert rows == texts
    assert samples.classes["when"] == sorted(set(texts))
    assert samples.table.summaries["when"].classes == {text: texts.count(text) for text in texts}


def test_zoned_times_of_parquet_are_instants(tmp_path: Path) -> None:
    times = pa.array([UNIX * 1000], pa.timestamp("ms", "Europe/Berlin"))
    parquet.write_table(pa.table({"when": times}), tmp_path / "t.parquet")
    samples = opened(tmp_path / "t.parquet", fields=[{"columns": ["when"], "unit": "seconds"}])
    assert samples.table.summaries["when"].kind == "zoned time"
    assert samples.read("when", np.array([0])).tolist() == [UNIX]
