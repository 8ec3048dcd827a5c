"""Files of a model's outputs: every format gives back the rows of all batches, in their order and shape."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ortflow.workflow.errors import UserError
from ortflow.workflow.inference.outputs import Rows, writing

BATCHES = [
    {"loss": np.float32([0.5, 1.5]), "logits": np.arange(12, dtype=np.float32).reshape(2, 2, 3)},
    {"loss": np.float32([2.5]), "logits": np.arange(12, 18, dtype=np.float32).reshape(1, 2, 3)},
]
WHOLE = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}


def write(path: Path, batches: Sequence[Rows] = BATCHES) -> Path:
    with writing(path, samples=3) as writer:
        for batch in batches:
            writer.write(batch)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_has_the_rows_with_their_shapes(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows{suffix}")
    table = pq.read_table(path) if suffix == ".parquet" else pa.ipc.open_file(str(path)).read_all()
    assert {name: table[name].to_pylist() for name in table.column_names} == {k: v.tolist() for k, v in WHOLE.items()}


def test_an_archive_has_an_array_of_each_output(tmp_path: Path) -> None:
    with np.load(write(tmp_path / "rows.npz")) as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {name: rows.tolist() for name, rows in WHOLE.items()}


def test_a_csv_has_a_column_of_each_element(tmp_path: Path) -> None:
    with write(tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == WHOLE["loss"].tolist()
    elements = [[[float(row[f"logits_{i}_{j}"]) for j in range(3)] for i in range(2)] for row in rows]
    assert elements == WHOLE["logits"].tolist()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv", ".npz"])
def test_batches_of_other_shapes_are_refused_and_leave_no_file(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other shapes"):
        write(tmp_path / f"rows{suffix}", [{"logits": np.zeros((1, length), np.float32)} for length in (2, 3)])
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.npz")
    before = path.read_bytes()
    with pytest.raises(UserError, match="is not replaced"):
        write(path)
    assert path.read_bytes() == before
