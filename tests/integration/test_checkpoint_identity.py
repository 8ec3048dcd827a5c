"""A run continues only from its own checkpoints, wherever the folder of its checkpoints is."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from project import curve
from tiny_runs import STEPS, Tiny, result

from ortflow.workflow.checkpoint.commit import mark
from ortflow.workflow.checkpoint.manifest import decode
from ortflow.workflow.checkpoint.store import DirectoryStore


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny.make(tmp_path / "p", checkpoint={"directory": str(tmp_path / "disk"), "every_steps": 3})


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"}


def stranger_refused(tiny: Tiny, disk: Path, *arguments: str) -> str:
    before = contents(disk)
    done = tiny.command("run", "run.yaml", *arguments)
    assert done.code == 2, done.said
    for part in ("checkpoint.directory", str(disk)):
        assert part in done.err, done.said
    assert contents(disk) == before
    return done.said


def test_a_new_run_is_refused_a_filled_folder(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml").code == 0
    before = contents(tiny.folder)
    stranger_refused(tiny, disk, "name=other", "seed=7")
    assert contents(tiny.folder) == before
    assert not (tiny.folder / "runs/other").exists(), "nothing is left of the refused run"


def test_fresh_puts_the_old_checkpoints_aside(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    old = tiny.run_dir.with_name("tiny.1")
    first = curve(tiny.run_dir)
    assert tiny.command("run", "run.yaml", "--fresh", "seed=7", "train.optimizer.lr=1e-3").code == 0
    assert [step for step, *_ in curve(tiny.run_dir)] == list(range(1, STEPS + 1))
    assert curve(tiny.run_dir)[:1] != first[:1]
    assert DirectoryStore(disk.with_name("disk.1")).steps() == [3, 6]
    assert tiny.command("resume", "tiny.1", f"train.steps={STEPS}").code == 0, "the old run continues where it went"
    assert DirectoryStore(disk.with_name("disk.1")).steps() == [9, 12]
    straight = tiny.command("run", "run.yaml", "name=straight", f"checkpoint.directory={disk}.2")
    assert straight.code == 0
    assert result(old)[0] == result(tiny.folder / "runs/straight")[0]


def test_fresh_leaves_the_checkpoints_of_a_third_run(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", "name=first").code == 0
    assert tiny.command("run", "run.yaml", "checkpoint.directory=checkpoints").code == 0
    before = contents(tiny.run_dir)
    stranger_refused(tiny, disk, "--fresh")
    assert contents(tiny.run_dir) == before


def test_ranks_refuse_what_no_launcher_has_seen(tiny: Tiny, disk: Path) -> None:
    """On Kubernetes the folder is on a volume; and a folder may be filled after a run has begun."""
    assert tiny.command("run", "run.yaml", "name=first", "seed=7").code == 0
    stranger = disk.with_name("stranger")
    disk.rename(stranger)
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    shutil.copytree(stranger / "step-00000012", disk / "step-00000012")
    said = stranger_refused(tiny, disk, f"train.steps={STEPS}")
    assert mentions(said, "step-00000012", "first", "seed 7", "0")


def test_a_folder_in_use_is_refused(tiny: Tiny, disk: Path) -> None:
    with tiny.start("run", "run.yaml", "train.steps=100000", "checkpoint.every_steps=1000000") as running:
        end = time.monotonic() + 30
        while not (disk / ".run.lock").exists() and time.monotonic() < end:
            time.sleep(0.05)
        done = tiny.command("run", "run.yaml", "name=other")
        running.terminate()
        running.communicate(timeout=30)
    assert done.code == 2, done.said
    assert mentions(done.said, str(disk), "in use", str(tiny.run_dir))
    assert tiny.command("run", "run.yaml", "train.steps=100000", "--detach").code == 0, "the run itself continues"
    assert tiny.command("cancel", "tiny").code == 0


def test_a_copied_run_is_refused_the_folder_of_the_original(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    copy = tiny.run_dir.with_name("copy")
    shutil.copytree(tiny.run_dir, copy)
    before = contents(disk)
    done = tiny.command("resume", "copy", f"train.steps={STEPS}")
    assert done.code == 2, done.said
    assert mentions(done.said, str(tiny.run_dir), str(copy), "copy")
    assert contents(disk) == before
    shutil.rmtree(tiny.run_dir)
    assert tiny.command("resume", "copy", f"train.steps={STEPS}").code == 0, "now it is the only one"


def test_copied_checkpoints_in_a_run_directory(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", "name=first").code == 0
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    step = tiny.run_dir / "checkpoints/step-00000012"
    shutil.copytree(tiny.folder / "runs/first/checkpoints/step-00000012", step)
    done = tiny.command("run", "run.yaml", f"train.steps={STEPS}")
    assert done.code == 2, done.said
    assert mentions(done.said, str(step), "first", "move it elsewhere")
    for words in (["export", "tiny"], ["export", "tiny", "--step", "12"]):
        done = tiny.command(*words)
        assert done.code == 2, done.said
        assert mentions(done.said, str(step), "first")
    shutil.rmtree(step)
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS}").code == 0


def test_the_identity_outlives_name_ranks_rate_and_a_lost_plan(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    (tiny.run_dir / "plan.json").unlink()
    changes = ["name=renamed", f"run_dir={tiny.run_dir}", "train.optimizer.lr=1e-3", "resources.ranks_per_node=2"]
    done = tiny.command("run", "run.yaml", *changes, "data.micro_batch=2", f"train.steps={STEPS}")
    assert done.code == 0, done.said
    assert [step for step, *_ in curve(tiny.run_dir)] == list(range(1, STEPS + 1))
    identities = {json.dumps(manifest(disk, step)["run"]) for step in DirectoryStore(disk).steps()}
    assert len(identities) == 1


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DirectoryStore(folder).place(step) / "manifest.json").read_bytes())
    return found


def without_identity(folder: Path) -> None:
    """Make the checkpoints those of an earlier version."""
    for step in DirectoryStore(folder).steps():
        place = DirectoryStore(folder).place(step)
        decoded = decode((place / "manifest.json").read_bytes())
        data = type(decoded)(**{**vars(decoded), "run": {}}).encode()
        (place / "manifest.json").write_bytes(data)
        (place / "COMMITTED").write_bytes(mark(data))


def test_a_run_of_an_earlier_version_continues(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    without_identity(disk)
    plan = json.loads((tiny.run_dir / "plan.json").read_text())
    del plan["run"], plan["hash"]
    (tiny.run_dir / "plan.json").write_text(json.dumps(plan))
    assert tiny.command("resume", "tiny", f"train.steps={STEPS}").code == 0
    assert [step for step, *_ in curve(tiny.run_dir)] == list(range(1, STEPS + 1))


def test_older_checkpoints_than_the_run_are_not_its_own(tiny: Tiny, disk: Path) -> None:
    assert tiny.command("run", "run.yaml", "name=first").code == 0
    without_identity(disk)
    stranger = disk.with_name("stranger")
    disk.rename(stranger)
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    shutil.copytree(stranger / "step-00000012", disk / "step-00000012")
    assert "before this run was submitted" in stranger_refused(tiny, disk, f"train.steps={STEPS}")


@pytest.mark.parametrize(
    "values", [["checkpoint.directory=/tmp/a"], ["export.path=/tmp/m.onnx"], ["monitor.tensorboard_directory=/tmp/t"]]
)
def test_a_sweep_whose_runs_share_an_output_is_refused(tmp_path: Path, values: list[str]) -> None:
    tiny = Tiny.make(tmp_path / "p")
    done = tiny.command("render", "-b", "slurm", "run.yaml", "--set", "seed=1..3", *values)
    assert done.code == 2, done.said
    assert mentions(done.err, *values[0].split("="), "relative")
    varied = [f"{values[0]}1", f"{values[0]}2"]
    key = values[0].partition("=")[0]
    paths = ",".join(value.partition("=")[2] for value in varied)
    assert tiny.command("render", "-b", "slurm", "run.yaml", "--set", f"{key}={paths}").code == 0
