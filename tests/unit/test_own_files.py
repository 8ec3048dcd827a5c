"""Files that ortflow did not write are never replaced or removed, whatever their names and links."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from data_sets import numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from trees import tree
from typer.testing import CliRunner

from ortflow.cli.data import app
from ortflow.launchers.attempts.locks import hold
from ortflow.launchers.stop import write_request
from ortflow.workflow.assembly.files import write_files
from ortflow.workflow.data import write
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.graph.head import check_export, check_model_to_train, read_head
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.rank import hold_ranks_lock
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.configure import prepare
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.system import own_files
from ortflow.workflow.system.disk_space import OutOfDisk
from ortflow.workflow.trainer import Report

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
    assert sorted(own_files.foreign_files(folder, NAMES)) == ["down", "other/a.txt", "own/b.md", "own/link.txt", "void"]
    assert not own_files.remove(folder, NAMES)
    assert sorted(tree(folder)) == ["down", "other", "other/a.txt", "own", "own/b.md", "own/link.txt", "void"]
    assert (outside / "a.txt").read_text() == "precious"
    (tmp_path / "link").symlink_to(outside)
    assert not own_files.remove(tmp_path / "link", re.compile(".*"))
    assert (outside / "a.txt").read_text() == "precious"


def test_a_folder_of_own_files_goes_whole(tmp_path: Path) -> None:
    (tmp_path / "folder" / "own").mkdir(parents=True)
    (tmp_path / "folder" / "own" / "a.txt").write_text("")
    assert own_files.remove(tmp_path / "folder", NAMES)
    assert own_files.remove(tmp_path / "folder", NAMES), "a missing folder counts as removed"
    assert list(tmp_path.iterdir()) == []


def test_files_that_belong_together_are_exchanged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, aside = tmp_path / "new", tmp_path / "aside"
    new.mkdir()
    aside.mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        (tmp_path / name).write_text("old")
        (new / name).write_text("new")
    before, rename, count = tree(tmp_path), os.rename, 0
    for failing in range(4):

        def fail(*names: Path, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count == failing + 1:
                raise OSError(5, "Input/output error")
            rename(*names)

        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(OSError, match="Input/output error"):
                own_files.exchange_all({tmp_path / name: new / name for name in ("m.onnx.data", "m.onnx")}, aside)
        assert tree(tmp_path) == before
    own_files.exchange_all({tmp_path / name: new / name for name in ("m.onnx.data", "m.onnx")}, aside)
    assert [path.read_text() for path in tmp_path.glob("m.*")] == ["new", "new"]
    assert [path.read_text() for path in aside.iterdir()] == ["old", "old"]


def places(folder: Path, source: Path) -> dict[str, Path]:
    """Outputs that are not, or not only, ortflow's sets."""
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
        with pytest.raises(UserError, match="not a data set") as error:
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
            with pytest.raises(OutOfDisk, match="out of disk on"):
                convert(source, tmp_path / "set", *options)
        assert tree(tmp_path) == before


def test_a_file_that_appears_while_a_set_is_written_stays(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        (tmp_path / "set").write_text("precious")
        yield write.record_batch({"x": np.arange(3)})

    with pytest.raises(UserError, match="exists already"):
        write.write_set(tmp_path / "set", batches())
    assert tree(tmp_path) == {"set": b"precious".hex()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An inference graph as a run keeps it."""
    folder = tmp_path_factory.mktemp("graphs")
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph([node], "model", values[:1], values[1:]),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
    )
    onnx.save(model, folder / "infer.onnx")
    return folder / "infer.onnx"


def strange_models(folder: Path) -> dict[str, Path]:
    """Foreign files that may exist at a model's path."""
    model = helper.make_model(helper.make_graph([], "theirs", [], []), producer_name="pytorch")
    found = {name: folder / f"{name}.onnx" for name in ("text", "model", "folder", "link", "nowhere", "empty")}
    found["text"].write_text("precious")
    onnx.save(model, found["model"])
    found["folder"].mkdir()
    (found["folder"] / "thesis.txt").write_text("precious")
    found["link"].symlink_to(found["model"])
    found["nowhere"].symlink_to(folder / "nothing")
    found["empty"].touch()
    (folder / "text-0123456789abcdef.data").write_text("precious")
    return found


def test_an_export_replaces_exports_only(tmp_path: Path, trained: Path) -> None:
    weights = {"w": np.ones(2, np.float32)}
    found = strange_models(tmp_path)
    before = tree(tmp_path)
    for place in found.values():
        with pytest.raises(UserError, match="is not a model"):
            export_inference(trained, weights, place)
        assert tree(tmp_path) == before
    for _ in range(2):
        export_inference(trained, weights, tmp_path / "own.onnx")
    first = onnx.load(tmp_path / "own.onnx")
    first.producer_name = ""  # as versions before 0.2 did
    onnx.save(first, tmp_path / "own.onnx")
    export_inference(trained, weights, tmp_path / "own.onnx")
    assert onnx.load(tmp_path / "own.onnx").producer_name == "ortflow"


def test_a_model_to_train_replaces_its_like_only(tmp_path: Path) -> None:
    for place in strange_models(tmp_path).values():
        with pytest.raises(UserError, match="export_for_training"):
            check_model_to_train(place)
    (tmp_path / "new.onnx.data").touch()
    with pytest.raises(UserError, match=r"new\.onnx\.data exists"):
        check_model_to_train(tmp_path / "new.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    model.metadata_props.add(key="ortflow.parameters", value="[]")
    onnx.save(model, tmp_path / "new.onnx")
    check_model_to_train(tmp_path / "new.onnx")
    with pytest.raises(UserError, match="has exported"):
        check_export(tmp_path / "new.onnx")


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_any_file_has_a_head_or_none(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        read_head(Path(file.name))


def test_records_of_a_run_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious, without an end of its last line")
    run = RunDir(tmp_path / "run")
    for path in (run.lock, run.ranks_lock, run.stop_request, run.attempts, run.events(0), run.plan):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        hold(run.lock)
    with pytest.raises(OSError, match="symbolic links"):
        hold_ranks_lock(run.ranks_lock)
    with pytest.raises(OSError, match="symbolic links"):
        run.record_attempt(event="start")
    with pytest.raises(OSError, match="symbolic links"):
        EventLog(run.events(0), 0, 0)
    write_request(run.stop_request, "cancel")
    write_atomically(run.plan, b"{}")
    assert (tmp_path / "theirs").read_text() == "precious, without an end of its last line"


def test_graphs_are_not_written_into_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "train.onnx").write_text("precious")
    (tmp_path / "graphs").symlink_to(tmp_path / "models")
    with pytest.raises(UserError, match="is a link"):
        write_files(GraphSet(tmp_path / "graphs", FlatIndex.place([]), ()), {"train.onnx": b"ours"}, {})
    assert tree(tmp_path / "models") == {"train.onnx": b"precious".hex()}


def test_an_export_that_could_not_be_written_is_refused_before_training(tmp_path: Path) -> None:
    values = {
        "name": "r", "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "m.onnx"), "loss": {"kind": "mse"}},
        "data": {"train": {"path": "d"}, "micro_batch": 1},
        "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}, "export": {"path": str(tmp_path / "m.onnx")},
    }  # fmt: skip
    (tmp_path / "m.onnx").write_text("precious")
    numbered(tmp_path / "d", 3)
    values["data"] = {"train": {"path": str(tmp_path / "d")}, "micro_batch": 1}

    def prepared(**changes: Any) -> None:
        spec, run_dir = TrainerRunSpec.model_validate({**values, **changes}), RunDir(tmp_path / "run")
        prepare(builder_of(spec, run_dir, Report()), run_dir, spec, Report())

    with pytest.raises(UserError, match=r"export\.path: .*m\.onnx is the model to train"):
        prepared()
    (tmp_path / "other.onnx").write_text("precious")
    with pytest.raises(UserError, match=r"export\.path: .*other\.onnx"):
        prepared(export={"path": str(tmp_path / "other.onnx")})
