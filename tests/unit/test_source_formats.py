"""Files that are no data set, no text or no run file: the message names the way that works."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import command_here
from messages import mentions

from ortflow.workflow.data.dataset import Dataset
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


def test_a_table_is_shown_and_converted(folder: Path) -> None:
    shown = command_here("data", "show", "flowers.csv", "--json", folder=folder)
    reported = json.loads(shown.stdout)
    assert (reported["format"], reported["rows"], reported["bad_rows"]) == ("CSV", 2, 0)
    assert reported["columns"]["length"]["mean"] == pytest.approx(1.45)
    assert reported["columns"]["species"]["most"] == {"setosa": 2}
    assert reported["first"][1] == {"length": 1.4, "width": 0.1, "species": "setosa"}
    for name in ("flowers.csv", "texts.jsonl"):
        assert "species" in command_here("data", "show", "flowers.csv", folder=folder).stdout
        done = command_here("data", "convert", name, "-o", f"{name}.arrow", folder=folder)
        assert done.returncode == 0, done.stderr
        assert "2 samples" in done.stdout
        assert "samples/s" in done.stdout
    dataset = Dataset.open(folder / "flowers.csv.arrow")
    assert dataset.read("length", np.array([1, 0])).tolist() == [1.4, 1.5]
    assert json.loads((folder / "flowers.csv.classes.json").read_text()) == {"species": ["setosa"]}
    done = command_here("data", "show", "arrays.npz", folder=folder)
    assert mentions(done.stdout, "2 samples in 1 file", "x: float32, shape [3]")


def test_a_table_is_verified(folder: Path) -> None:
    assert command_here("data", "verify", "flowers.csv", folder=folder).returncode == 0
    (folder / "bad.csv").write_text("a,b\n1,2\n3\n4,5\n6,7,8\n")
    done = command_here("data", "verify", "bad.csv", folder=folder)
    assert done.returncode == 2
    assert mentions(done.stdout, "2 rows can be read", "2 are bad", "bad.csv, line 3", "bad.csv, line 5")
    assert mentions(command_here("data", "show", "bad.csv", folder=folder).stdout, "bad.csv, line 3")
    assert mentions(refused(folder, "data", "convert", "bad.csv", "-o", "bad.arrow"), "bad.csv, line 3", "verify")
    assert not (folder / "bad.arrow").exists()


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
        *(
            (f"set.{end}", "is data", "ortflow init MODEL --data")
            for end in ("csv", "jsonl", "npz", "parquet", "arrow")
        ),
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
        ("t.csv", "read where it is", "one column"),
        ("t.TSV", "`ortflow data convert t.TSV`", "one column"),
        ("t.ndjson", "read where it is", "jq -r .text t.ndjson > t.txt"),
        ("t.parquet", "read where it is", "one column"),
        ("t.json", "jq -c '.[]' t.json > t.jsonl", "give text"),
        ("notes", ".npz file, or give text", "give text"),
    ],
)
def test_the_way_that_a_files_name_suggests(name: str, to_a_set: str, to_lines: str) -> None:
    assert to_a_set in way_to_a_set(Path(name))
    assert to_lines in way_to_lines(Path(name))
