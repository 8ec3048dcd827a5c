"""Inputs that are copied with a run file: named by content, and copied completely or not at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

from ortflow.launchers.remote.bootstrap import BROUGHT, MARK
from ortflow.launchers.remote.connection import Connection
from ortflow.launchers.remote.inputs import Item, Named, external_data, item, named, prepare_files
from ortflow.launchers.remote.login import BOOTSTRAP, Login
from ortflow.launchers.remote.payload import pack
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.load import load_run_file, load_run_text

RUN = """\
name: here
model: {path: model.onnx, loss: mse}
data: {train: {path: ../data/train}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
"""
LOGIN = Login(Connection("login"), "python3", "~/ortflow")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file, its model with weights beside it, and a folder of data elsewhere."""
    folder = tmp_path / "project"
    for path in (folder, tmp_path / "data/train/.hidden"):
        path.mkdir(parents=True)
    (folder / "run.yaml").write_text(RUN)
    entry = b"\x0a\x08location\x12"
    long = "w" * 200
    (folder / "model.onnx").write_bytes(
        b"\x08\x08" + entry + b"\x06w.data" + entry + b"\x07../evil" + entry + b"\xc8\x01" + long.encode() + b"\x00"
    )
    for name in ("w.data", long):
        (folder / name).write_text(name)
    (tmp_path / "evil").write_text("")
    for name in ("0.arrow", "1.arrow", ".hidden/x"):
        (tmp_path / "data/train" / name).write_text(name)
    return folder / "run.yaml"


def test_weights_beside_a_model_go_along(file: Path) -> None:
    assert external_data(file.parent / "model.onnx") == ["w.data", "w" * 200]
    (file.parent / "empty.onnx").touch()
    assert external_data(file.parent / "empty.onnx") == []


def test_what_goes_along(file: Path) -> None:
    payload = pack(load_run_file(file), file, LOGIN, [])
    assert [sorted(one.item.files) for one in payload.parcels] == [
        ["model.onnx", "w.data", "w" * 200], ["0.arrow", "1.arrow"], ["run.yaml"],
    ]  # fmt: skip
    overrides = dict(text.split("=", 1) for text in payload.overrides())
    assert sorted(overrides) == ["data.train.path", "model.path"]
    model, data = json.loads(overrides["model.path"]), json.loads(overrides["data.train.path"])
    assert model.startswith("~/ortflow/inputs/")
    assert model.endswith("/model.onnx")
    assert data.count("/") == 3
    again = load_run_file(file, payload.overrides())
    assert (again.model.path, again.data.train.path) == (model, data)
    assert payload.run_file.startswith("inputs/")


def test_names_follow_the_content(file: Path) -> None:
    one = Named("data.train.path", "../data/train", file.parent.parent / "data/train")
    before = item(one).digest()
    os.utime(one.local_path / "0.arrow", (1, 1))
    assert item(one).digest() == before
    (one.local_path / "0.arrow").write_text("0.arroW")
    assert item(one).digest() != before


def test_what_the_cluster_has_by_itself(file: Path, tmp_path: Path) -> None:
    spec = load_run_file(file, ["data.train.path=/big/set"])
    payload = pack(spec, file, LOGIN, ["/big/set"])
    assert [one.key for one in payload.parcels] == ["model.path", ""]
    with pytest.raises(UserError, match=r"data\.train\.path.*/big/set.*login.*correct"):
        pack(spec, file, LOGIN, [])
    own = load_run_file(file, [f"data.train.path={tmp_path}/data/train"])
    assert [one.key for one in pack(own, file, LOGIN, []).parcels] == ["model.path", "data.train.path", ""]


def test_lists_and_urls_are_not_copied(file: Path) -> None:
    def keys(path: str) -> list[str]:
        return [one.key for one in named(load_run_text(RUN.replace("../data/train", path), "run.yaml"), file.parent)]

    assert keys("[/data/a.csv, 's3://bucket/b.csv']") == keys("https://host/a.csv") == ["model.path"]
    with pytest.raises(UserError, match=r"data.train.path: is a list of files here.*into one folder"):
        keys("[/data/a.csv, b.csv]")


def test_images_of_containers_go_along(file: Path) -> None:
    (file.parent / "box.sif").write_text("image")
    spec = load_run_file(file, ["backends.slurm.container={kind: apptainer, image: ./box.sif}"])
    assert "backends.slurm.container.image" in [one.key for one in named(spec, file.parent)]
    spec = load_run_file(file, ["backends.slurm.container={kind: apptainer, image: 'docker://x/y'}"])
    assert "backends.slurm.container.image" not in [one.key for one in named(spec, file.parent)]


def test_what_is_prepared_on_the_host(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = file.parent
    for name in ("make.py", "helper.py", "settings.json"):
        (folder / name).write_text(name)
    (folder.parent / "outside.py").write_text("")
    command = ["python", "make.py", "--with", "settings.json", "../outside.py", "model"]
    assert sorted(prepare_files(command, folder)) == ["helper.py", "make.py", "settings.json"]
    changes = ["data.train.path=made.arrow", "prepare=[python, make.py]"]
    payload = pack(load_run_file(file, changes), file, LOGIN, [])
    assert [one.key for one in payload.parcels] == ["model.path"]
    assert sorted(payload.preparation[0].item.files) == ["helper.py", "make.py", "run.yaml"]
    assert mentions(capsys.readouterr().err, "made.arrow", "`prepare`", "login", "helper.py, make.py")
    with file.open("a") as text:
        text.write("\n")
    assert pack(load_run_file(file, changes), file, LOGIN, []).preparation[0].folder == payload.preparation[0].folder


def there(wish: dict[str, Any], files: Item | None = None, cut: int | None = None) -> dict[str, Any]:
    """The host's answer."""
    pipe = io.BytesIO()
    if files is not None:
        files.write_tar(pipe)
    done = subprocess.run(
        [sys.executable, str(BOOTSTRAP)], input=json.dumps(wish).encode() + b"\n" + pipe.getvalue()[:cut],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout.decode().split(MARK)[1])
    return answer


def test_files_arrive_whole_or_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"a" * 100_000)
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    sent = Item({"deep/a": source / "a", "run": source / "run"})
    final = tmp_path / "there/x/inputs"
    wish = {"do": "take", "folder": str(final), "files": sent.sizes}
    assert "broke" in there(wish, sent, cut=50_000)["error"]
    assert list(final.parent.iterdir()) == []
    assert there(wish, sent) == {}
    assert (final / "deep/a").read_bytes() == b"a" * 100_000
    assert os.access(final / "run", os.X_OK)
    asked = {"do": "ask", "packages": [], "folders": [(str(final), sent.sizes)], "paths": [str(final), "/no/where"]}
    assert [there(asked)[key] for key in ("whole", "there")] == [[True], [True, False]]

    # A part was deleted, as happens in scratch folders: everything is copied again.
    (final / "deep/a").unlink()
    assert there(asked)["whole"] == [False]
    assert there(wish, sent) == {}
    assert there(asked)["whole"] == [True]
    assert [path.name for path in final.parent.iterdir()] == ["inputs"]


def test_a_folder_that_stays_keeps_what_was_made_in_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("new")
    final = tmp_path / "kept"
    final.mkdir()
    (final / "made.arrow").write_text("made")
    (final / "run.yaml").write_text("before")
    sent = Item({"run.yaml": tmp_path / "run.yaml"})
    wish = {"do": "take", "folder": str(final), "files": sent.sizes, "into": True}
    for text in ("new", "newer", "newest"):
        (tmp_path / "run.yaml").write_text(text)
        assert there({**wish, "files": sent.sizes}, sent) == {}
    names = {path.name: path.read_text() for path in final.iterdir() if path.name != BROUGHT}
    assert names == {"made.arrow": "made", "run.yaml": "newest", "run.yaml.1": "before"}
    (final / "run.yaml").write_text("changed by hand")
    assert there({**wish, "files": sent.sizes}, sent) == {}
    assert (final / "run.yaml.2").read_text() == "changed by hand"


def test_nothing_is_written_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("new")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "train.py").write_text("precious")
    final = tmp_path / "kept"
    final.mkdir()
    (final / "deep").symlink_to(tmp_path / "outside")
    (final / "train.py").symlink_to(tmp_path / "outside" / "train.py")
    for name, error in (("deep/train.py", {"error": "is a link, which is not followed"}), ("train.py", {})):
        sent = Item({name: tmp_path / "train.py"})
        wish = {"do": "take", "folder": str(final), "files": sent.sizes, "into": True}
        assert there(wish, sent).get("error") == error.get("error")
    assert (tmp_path / "outside" / "train.py").read_text() == "precious"
    assert (final / "train.py").read_text() == "new"
    assert (final / "train.py.1").is_symlink()


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    sent = Item({"a": tmp_path / "a"})
    final = tmp_path / "inputs"
    wish = {"do": "take", "folder": str(final), "files": sent.sizes}
    assert there(wish, sent) == {}
    (final / "a").unlink()
    (final / "__pycache__").mkdir()
    (final / "__pycache__" / "a.pyc").touch()
    assert there(wish, sent) == {}
    (final / "a").unlink()
    (final / "thesis.txt").write_text("precious")
    answer = there(wish, sent)
    assert mentions(answer["error"], "not copied there by ortflow", "not replaced")
    assert answer["file"] == str(final / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "link").symlink_to(final)
    assert there({**wish, "folder": str(tmp_path / "link")}, sent)["file"] == str(tmp_path / "link")
    assert (final / "thesis.txt").read_text() == "precious"


def test_packages_that_are_lacking() -> None:
    packages = [("pydantic", [2, 9], [3]), ("typer", [99], []), ("rich", [], [1]), ("no-such-thing", [], [])]
    assert there({"do": "ask", "packages": packages, "folders": [], "paths": []})["lacking"] == [
        "typer", "rich", "no-such-thing",
    ]  # fmt: skip


def test_graphs_of_metrics_and_teachers_are_copied_and_named(file: Path) -> None:
    text = RUN.replace("loss: mse", "loss: {kind: kl_div, teacher: t.onnx}, metrics: [{name: graph, path: m.onnx}]")
    file.write_text(text)
    for name in ("t.onnx", "m.onnx"):
        (file.parent / name).write_bytes(b"")
    found = {one.key: one for one in named(load_run_file(file), file.parent)}
    assert found["model.loss.teacher"].local_path == file.parent / "t.onnx"
    assert item(found["model.metrics.0.path"]).files == {"m.onnx": file.parent / "m.onnx"}
    there = load_run_file(file, ["model.metrics.0.path=/there/m.onnx"])
    assert there.model is not None
    assert there.model.metrics[0].path == "/there/m.onnx"
