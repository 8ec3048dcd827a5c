"""JSON that others write may nest deeper than Python's parser follows: it counts as damaged, as any other text does."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from ortflow.launchers import stop
from ortflow.launchers.attempts import locks
from ortflow.launchers.interpreter import examine
from ortflow.launchers.kubernetes import api, lines, ownership
from ortflow.launchers.proving import traces
from ortflow.launchers.remote import bootstrap, memory
from ortflow.workflow.cuda import algorithms
from ortflow.workflow.data import schema
from ortflow.workflow.data.sources.tar_shards import index_of
from ortflow.workflow.data.tables import store
from ortflow.workflow.data.tables.files import files_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.recorded_roles import FROZEN, recorded
from ortflow.workflow.graph.roles import scopes
from ortflow.workflow.program.report import read_plan
from ortflow.workflow.run import profile_records
from ortflow.workflow.run.fence import Fence
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.runtime_check import remember
from ortflow.workflow.system.disk_space import Notice
from ortflow.workflow.weights import kept
from ortflow.workflow.weights.sources import open_weights
from ortflow.workflow.weights.table import from_json

NESTED = "[" * 200_000

FILES: dict[str, tuple[str, Callable[[Path], object], object]] = {
    "a run's plan": ("plan.json", lambda path: read_plan(RunDir(path.parent)), {}),
    "a table's index": ("record.json", lambda path: store._load(path.parent), None),
    "a trace of steps": ("rank.jsonl", lambda path: profile_records.records(path.parent), {}),
    "the check of a runtime": ("outcome.json", remember._read, None),
    "the weights that a run has started from": (kept.RECORD, lambda path: kept.read_record(path.parent), None),
    "a GPU's algorithm": ("algorithm.json", lambda path: algorithms._read(path, "key"), None),
    "the holder of a lock": ("lock", locks._holder, {}),
    "a request to stop": ("stop", stop.read_request, {}),
    "a run's owner": ("owner", lambda path: Fence(path, "token")._owner(), None),
    "a notice of a full disk": ("heartbeat", lambda path: Notice(path)._load(), (None, False, False)),
    "the traces of a proof": ("trace.jsonl", lambda path: list(traces._records(path)), []),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_counts_as_damaged(tmp_path: Path, name: str) -> None:
    file, read, nothing = FILES[name]
    (tmp_path / file).write_text(NESTED)
    assert read(tmp_path / file) == nothing


def test_the_owner_of_a_run_on_kubernetes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.owner.parent.mkdir(parents=True, exist_ok=True)
    run.owner.write_text(NESTED)
    assert ownership.owner_of(run) is None


def test_what_was_last_used_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    memory._file().parent.mkdir(parents=True)
    memory._file().write_text(NESTED)
    assert memory._read() == {}


def test_files_brought_to_a_host(tmp_path: Path) -> None:
    new, final = tmp_path / "new", tmp_path / "final"
    for folder in (new, final):
        folder.mkdir()
    (new / "run.yaml").write_text("name: a")
    (final / bootstrap.BROUGHT).write_text(NESTED)
    bootstrap.place_files(str(new), str(final), ["run.yaml"])
    assert (final / "run.yaml").read_text() == "name: a"


def test_lines_of_a_pod() -> None:
    assert lines.read_line(lines.MARK + NESTED) == lines.Text(None, lines.MARK + NESTED)
    assert api._json(NESTED) == {}


def test_an_interpreter_that_prints_something_else(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nhead -c {len(NESTED)} /dev/zero | tr '\\0' '['\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match="does not run as a Python interpreter"):
        examine(str(python))


def test_ranges_of_a_column() -> None:
    with pytest.raises(schema.UnusableError, match="the ranges in its metadata are damaged"):
        schema.decode_ranges({schema.RANGES_KEY: NESTED.encode()})


def test_the_state_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(NESTED)
    with pytest.raises(UserError, match="is not the state of a Hugging Face dataset"):
        files_of(tmp_path)


def test_a_sample_of_a_shard(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name, data in (("1.png", b"image"), ("1.json", NESTED.encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))
    with pytest.raises(UserError, match=r"1\.json cannot be read"):
        index_of(tmp_path / "a.tar")


def test_an_index_of_shards(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(NESTED)
    with pytest.raises(UserError, match="is not an index of shards"):
        open_weights(tmp_path / "model.safetensors.index.json")


def test_properties_of_a_model() -> None:
    with pytest.raises(UserError, match="is damaged"):
        from_json(NESTED)
    model = onnx.ModelProto()
    model.metadata_props.add(key=FROZEN, value=NESTED)
    with pytest.raises(UserError, match="is not a list of names"):
        recorded(model)
    node = onnx.NodeProto()
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=NESTED)
    assert scopes.innermost(node) is None
