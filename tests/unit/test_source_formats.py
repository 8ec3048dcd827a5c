"""Files that are no data set, no text or no run file: the message names the way that works."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import command_here

from ortflow.workflow.data.source_formats import way_to_a_set, way_to_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flowers.csv").write_text("length,width,species\n1.5,0.2,setosa\n1.4,0.1,setosa\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in ("one", "two")))
    np.savez(tmp_path / "arrays.npz", x=np.zeros((2, 3), "float32"))
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    return tmp_path


def refused(folder: Path, *words: str) -> str:
    done = command_here(*words, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def test_a_table_is_no_circle(folder: Path) -> None:
    """`data show` sent to `data convert`, and that to --text."""
    for words in (("show", "flowers.csv"), ("convert", "flowers.csv", "-o", "flowers.arrow")):
        reported = refused(folder, "data", *words)
        assert "pandas.read_csv('flowers.csv')" in reported
        assert "ortflow data convert flowers.npz" in reported
        assert "--text" not in reported
    assert "ortflow data convert arrays.npz" in refused(folder, "data", "show", "arrays.npz")


@pytest.mark.parametrize(
    ("name", "options", "way"),
    [
        ("texts.jsonl", ("--lines",), "jq -r .text texts.jsonl"),
        ("texts.jsonl", ("--text", "--length", "8"), "jq -r .text texts.jsonl"),
        ("flowers.csv", ("--lines",), "one column"),
        ("arrays.npz", ("--lines",), "leave --text and --lines out"),
    ],
)
def test_tables_are_not_lines(folder: Path, name: str, options: tuple[str, ...], way: str) -> None:
    reported = refused(folder, "data", "convert", name, *options, "-o", "set.arrow")
    assert name in reported
    assert way in reported
    assert not (folder / "set.arrow").exists()


def test_text_stays_text(folder: Path) -> None:
    assert command_here("data", "convert", "words.txt", "--lines", "-o", "words.arrow", folder=folder).returncode == 0


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [
        ("model.onnx", "a model", "model: {path"),
        ("weights.pt", "PyTorch", "export_for_training"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "validate"])
def test_other_files_in_place_of_a_run_file(folder: Path, name: str, kind: str, way: str, verb: str) -> None:
    (folder / name).write_text("import torch\n")
    reported = refused(folder, verb, name)
    assert kind in reported
    assert "not a run file" in reported
    assert way in reported


@pytest.mark.parametrize(
    ("name", "to_a_set", "to_lines"),
    [
        ("a.npz", "`ortflow data convert a.npz --output a.arrow`", "leave --text and --lines out"),
        ("A.NPY", "`ortflow data convert A.NPY --output A.arrow`", "leave --text and --lines out"),
        ("t.csv", "pandas.read_csv('t.csv')", "one column"),
        ("t.TSV", "pandas.read_csv('t.TSV', sep='\\t')", "one column"),
        ("t.ndjson", "pandas.read_json('t.ndjson', lines=True)", "jq -r .text t.ndjson > t.txt"),
        ("t.parquet", "pandas.read_parquet('t.parquet')", "one column"),
        ("notes", ".npz file, or give text", "give text"),
    ],
)
def test_the_way_that_a_files_name_suggests(name: str, to_a_set: str, to_lines: str) -> None:
    assert to_a_set in way_to_a_set(Path(name))
    assert to_lines in way_to_lines(Path(name))
