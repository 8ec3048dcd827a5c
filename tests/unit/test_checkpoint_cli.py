from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import INDEX, progress_of, save, state
from messages import alike, says
from typer.testing import CliRunner, Result

from ortflow.cli.checkpoint import app
from ortflow.launchers.attempts.locks import hold
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A run with intact checkpoints of steps 10, 20 and 30."""
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text("name: small\ncheckpoint: {directory: saved, every_steps: 10}\n")
    store = DirectoryStore(run / "saved")
    for step in (10, 20, 30):
        save(store, step, state(step), epoch=step // 10)
    return store


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_run_is_found_by_name_directory_and_folder(store: DirectoryStore) -> None:
    run = store.path.parent
    for arguments in (["small", "--runs-dir", run.parent], [run], [store.path]):
        rows = json.loads(call("list", *arguments, "--json").stdout)
        assert [row["step"] for row in rows] == [10, 20, 30]
    with pytest.raises(UserError, match="there is no run smal"):
        call("list", "smal", "--runs-dir", run.parent)


def test_list(store: DirectoryStore) -> None:
    os.truncate(store.place(20) / "rank-0001.safetensors", 77)
    (store.place(30) / "COMMITTED").unlink()
    lines = call("list", store.path).stdout.splitlines()
    assert lines[0].startswith("step-00000010  20")
    assert lines[0].endswith("2 ranks")
    assert says(lines[1], "step-00000020  damaged: rank-0001.safetensors … 77 bytes … manifest")
    assert says(lines[2], "step-00000030  damaged: COMMITTED … never finished")
    first, second, third = json.loads(call("list", store.path, "--json").stdout)
    assert first["committed"]
    assert first["reason"] is None
    assert first["progress"] == progress_of(10, epoch=1)
    assert first["world_size"] == 2
    assert not second["committed"]
    assert not third["committed"]
    assert "never finished" in third["reason"]


def test_list_of_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: small\n")
    assert call("list", tmp_path).stdout == f"no checkpoints in {tmp_path}/checkpoints\n"
    assert json.loads(call("list", tmp_path, "--json").stdout) == []
    with pytest.raises(UserError, match="no checkpoint in"):
        call("verify", tmp_path)


def test_verify(store: DirectoryStore) -> None:
    result = call("verify", store.path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{store.place(step)}: whole" for step in (10, 20, 30)]
    path = store.place(20) / "rank-0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    (store.place(20) / "rank-0000.safetensors").unlink()
    result = call("verify", store.path)
    assert result.exit_code == 1
    assert alike(
        result.stdout.splitlines(),
        [
            f"{store.place(10)}: whole",
            f"{store.place(20)}/rank-0000.safetensors: is missing",
            f"{path}: … corrupt … hash",
            f"{store.place(30)}: whole",
        ],
    )
    assert call("verify", store.path, "--step", "30").exit_code == 0
    result = call("verify", store.path, "--step", "20", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)
    assert not row["whole"]
    assert [fault["path"] for fault in row["faults"]] == [str(store.place(20) / "rank-0000.safetensors"), str(path)]
    with pytest.raises(UserError, match=r"step 40.*10, 20, 30"):
        call("verify", store.path, "--step", "40")


def test_show(store: DirectoryStore) -> None:
    (store.place(30) / "manifest.json").write_text("{}")
    lines = call("show", store.path, "--tensors").stdout.splitlines()
    assert lines[0] == str(store.place(20))
    assert f"buffer    parameters: {INDEX.size} elements of F32" in lines
    assert "progress  epoch: 2" in lines
    assert lines[-2:] == ["  weight  5x7  decay  at 0", "  bias  3  no_decay  at 64"]
    reported = json.loads(call("show", store.path, "--step", "10", "--json").stdout)
    assert reported["progress"] == progress_of(10, epoch=1)
    assert reported["tensors"] == INDEX.to_json()
    assert [file["name"] for file in reported["files"]] == ["rank-0000.safetensors", "rank-0001.safetensors"]


def test_prune(store: DirectoryStore) -> None:
    assert call("prune", store.path, "--newest", "1", "--every", "20").stdout == f"deleted {store.place(10)}\n"
    assert store.steps() == [20, 30]


def test_prune_deletes_damaged_ones_only_when_asked(store: DirectoryStore) -> None:
    (store.place(30) / "COMMITTED").unlink()
    os.truncate(store.place(10) / "manifest.json", 3)
    store.set_aside(10, 0)
    assert call("prune", store.path, "--newest", "1").stdout == ""
    assert store.steps() == [20, 30]
    assert call("list", store.path).stdout.splitlines()[-1] == "rejected-step-00000010-00  damaged, renamed"
    descriptor = hold(RunDir(store.path.parent).lock)
    with pytest.raises(UserError, match="is active"):
        call("prune", store.path, "--newest", "1", "--damaged")
    os.close(descriptor)
    call("prune", store.path, "--newest", "1", "--damaged")
    assert [path.name for path in store.path.iterdir()] == ["step-00000020"]


def test_prune_keeps_what_holds_more_than_a_checkpoint(store: DirectoryStore) -> None:
    (store.place(10) / "thesis.txt").touch()
    (store.path / "rejected-step-00000020-00").mkdir()
    (store.path / "rejected-step-00000020-00" / "thesis.txt").touch()
    (store.place(10) / "COMMITTED").unlink()
    reported = call("prune", store.path, "--newest", "9", "--damaged").stderr.splitlines()
    assert [line.partition(",")[0] for line in reported] == [
        f"kept {store.path / name}" for name in ("step-00000010", "rejected-step-00000020-00")
    ]
    assert len(list(store.path.glob("*/thesis.txt"))) == 2


@pytest.mark.parametrize("verb", ["list", "verify", "show", "prune --newest 2"])
def test_the_plain_install_suffices(store: DirectoryStore, verb: str) -> None:
    """No numpy, no ONNX Runtime, no safetensors: as on a laptop that only reads runs."""
    program = (
        "import sys\n"
        "for name in ('numpy', 'onnx', 'onnxruntime', 'safetensors', 'mpi4py', 'pyarrow'): sys.modules[name] = None\n"
        "from ortflow.cli.checkpoint import app\n"
        f"app({[*verb.split()[:1], str(store.path), *verb.split()[1:]]!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "0010" in result.stdout or verb == "show"


def test_reshape_and_merge(store: DirectoryStore, tmp_path: Path) -> None:
    done = call("reshape", store.path, "--ranks", 3, "--output", tmp_path / "three", "--step", 20)
    assert "step-00000020: 3 ranks" in done.stdout
    rows = json.loads(call("list", tmp_path / "three", "--json").stdout)
    assert [(row["step"], row["world_size"], row["committed"]) for row in rows] == [(20, 3, True)]
    done = call("merge", store.path, "--output", tmp_path / "model.safetensors")
    assert "model.safetensors: step 30" in done.stdout
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        call("merge", store.path, "--output", tmp_path / "other", "--step", 7)


def test_reshape_into_a_run_that_continues(store: DirectoryStore, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "other"
    other.mkdir()
    lock = hold(RunDir(other).lock)
    assert lock is not None
    try:
        with pytest.raises(UserError, match="is active"):
            call("reshape", store.path, "--ranks", 3, "--output", other / "checkpoints")
    finally:
        os.close(lock)
