"""Nothing that ortflow did not write is replaced or removed, whatever it is called and wherever links lead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from trees import tree
from typer.testing import CliRunner

from ortflow.cli.data import app
from ortflow.workflow import owned
from ortflow.workflow.data import write
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.errors import UserError

NAMES = re.compile(r"own/[a-z]+\.txt|mark|empty/")


def convert(source: Path, output: Path, *options: object) -> None:
    arguments = ["convert", str(source), "--output", str(output), "--force", *map(str, options)]
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", x=np.arange(20))
    return tmp_path / "x.npz"


def test_own_files_go_and_all_else_stays(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("precious")
    for name in ("own/a.txt", "own/b.md", "other/a.txt", "mark"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").mkdir()
    (folder / "void").mkdir()
    (folder / "own" / "link.txt").symlink_to(outside / "a.txt")
    (folder / "down").symlink_to(outside)
    assert sorted(owned.strangers(folder, NAMES)) == ["down", "other/a.txt", "own/b.md", "own/link.txt", "void"]
    assert not owned.remove(folder, NAMES)
    assert sorted(tree(folder)) == ["down", "other", "other/a.txt", "own", "own/b.md", "own/link.txt", "void"]
    assert (outside / "a.txt").read_text() == "precious"
    (tmp_path / "link").symlink_to(outside)
    assert not owned.remove(tmp_path / "link", re.compile(".*"))
    assert (outside / "a.txt").read_text() == "precious"


def test_a_folder_of_own_files_goes_whole(tmp_path: Path) -> None:
    (tmp_path / "folder" / "own").mkdir(parents=True)
    (tmp_path / "folder" / "own" / "a.txt").write_text("")
    assert owned.remove(tmp_path / "folder", NAMES)
    assert owned.remove(tmp_path / "folder", NAMES), "what is not there is gone"
    assert list(tmp_path.iterdir()) == []


def places(folder: Path, source: Path) -> dict[str, Path]:
    """Outputs that are not, or not only, sets of ours."""
    found = {name: folder / name for name in ("file", "folder", "shards", "named", "parts", "link", "down", "hidden")}
    found["file"].write_text("precious")
    found["folder"].mkdir()
    (found["folder"] / "thesis.txt").write_text("precious")
    convert(source, found["shards"], "--shard-samples", 5)
    (found["shards"] / "notes.txt").write_text("precious")
    found["named"].mkdir()
    (found["named"] / "shard-00000.arrow").write_text("precious, and not ours")
    convert(source, found["parts"], "--eval-fraction", 0.2)
    (found["parts"] / "eval.arrow").unlink()
    (found["parts"] / "eval.arrow").symlink_to(source)
    found["link"].symlink_to(found["folder"])
    convert(source, found["down"], "--shard-samples", 5)
    (found["down"] / "train").symlink_to(found["folder"])
    convert(source, found["hidden"], "--shard-samples", 5)
    (found["hidden"] / ".git").mkdir()
    (found["hidden"] / ".git" / "config").write_text("precious")
    return found


@pytest.mark.parametrize("options", [(), ("--shard-samples", 3), ("--eval-fraction", 0.5)])
def test_force_replaces_sets_of_ours_only(tmp_path: Path, source: Path, options: tuple[Any, ...]) -> None:
    found = places(tmp_path, source)
    before = tree(tmp_path)
    for place in found.values():
        with pytest.raises(UserError, match="not a set of samples that ortflow has written") as error:
            convert(source, place, *options)
        assert str(place) in str(error.value)
    assert tree(tmp_path) == before


def test_every_kind_of_set_replaces_every_other(tmp_path: Path, source: Path) -> None:
    kinds: list[tuple[Any, ...]] = [(), ("--shard-samples", 3), ("--eval-fraction", 0.5)]
    for first in kinds:
        for second in kinds:
            convert(source, tmp_path / "set", *first)
            convert(source, tmp_path / "set", *second)
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert len(Dataset.open(tmp_path / "empty")) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "set", "x.npz"]


@pytest.mark.parametrize("options", [(), ("--shard-samples", 5)])
def test_the_old_set_comes_back_where_the_new_one_cannot_stand(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...]
) -> None:
    convert(source, tmp_path / "set", *options)
    before = tree(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((os, "replace"), (write, "record_batch"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            if name == "record_batch":
                patch.setattr("ortflow.workflow.data.convert.record_batch", full)
            with pytest.raises(UserError, match="No space left"):
                convert(source, tmp_path / "set", *options)
        assert tree(tmp_path) == before


def test_a_file_that_appears_while_a_set_is_written_stays(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        (tmp_path / "set").write_text("precious")
        yield write.record_batch({"x": np.arange(3)})

    with pytest.raises(UserError, match="exists already"):
        write.write_set(tmp_path / "set", batches())
    assert tree(tmp_path) == {"set": b"precious".hex()}
