"""A run continues only from its own checkpoints, wherever the folder of its checkpoints is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from project import curve
from tiny_runs import STEPS, Tiny, result
from waits import PATIENCE, wait_until

from ortflow.workflow.checkpoint.commit import mark
from ortflow.workflow.checkpoint.manifest import decode
from ortflow.workflow.checkpoint.store import DirectoryStore

HALF = STEPS // 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the project and its disk. The path of its checkpoints is absolute: a copy needs the same place."""
    return tmp_path_factory.mktemp("identity") / "here"


def project_with_disk(folder: Path) -> Tiny:
    return Tiny.make(folder / "p", checkpoint={"directory": str(folder / "disk"), "every_steps": 3})


def run_aside(place: Path, name: str, *values: str) -> Path:
    """A folder with the project and its disk behind a run."""
    shutil.rmtree(place, ignore_errors=True)
    assert project_with_disk(place).command("run", "run.yaml", *values).code == 0
    return place.rename(place.with_name(name))


@pytest.fixture(scope="module")
def half_done(place: Path) -> Path:
    return run_aside(place, "half", f"train.steps={HALF}")


@pytest.fixture(scope="module")
def first_done(place: Path) -> Path:
    return run_aside(place, "first", "name=first", "seed=7")


def copied(done: Path, place: Path) -> Tiny:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(done, place, symlinks=True)
    return Tiny(place / "p")


@pytest.fixture
def half(half_done: Path, place: Path) -> Tiny:
    return copied(half_done, place)


@pytest.fixture
def first(first_done: Path, place: Path) -> Tiny:
    return copied(first_done, place)


@pytest.fixture
def disk(place: Path) -> Path:
    return place / "disk"


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


def test_a_new_run_is_refused_a_filled_folder(first: Tiny, disk: Path) -> None:
    before = contents(first.folder)
    stranger_refused(first, disk, "name=other", "seed=8")
    assert contents(first.folder) == before
    assert not (first.folder / "runs/other").exists(), "nothing is left of the refused run"


def test_fresh_puts_the_old_checkpoints_aside(half: Tiny, disk: Path) -> None:
    old = half.run_dir.with_name("tiny.1")
    first = curve(half.run_dir)
    assert half.command("run", "run.yaml", "--fresh", "seed=7", "train.optimizer.lr=1e-3").code == 0
    assert [step for step, *_ in curve(half.run_dir)] == list(range(1, STEPS + 1))
    assert curve(half.run_dir)[:1] != first[:1]
    assert DirectoryStore(disk.with_name("disk.1")).steps() == [3, 6]
    assert half.command("resume", "tiny.1", f"train.steps={STEPS}").code == 0, "the old run continues where it went"
    assert DirectoryStore(disk.with_name("disk.1")).steps() == [9, 12]
    straight = half.command("run", "run.yaml", "name=straight", f"checkpoint.directory={disk}.2")
    assert straight.code == 0
    assert result(old)[0] == result(half.folder / "runs/straight")[0]


def test_fresh_leaves_the_checkpoints_of_a_third_run(first: Tiny, disk: Path) -> None:
    assert first.command("run", "run.yaml", "checkpoint.directory=checkpoints", f"train.steps={HALF}").code == 0
    before = contents(first.run_dir)
    stranger_refused(first, disk, "--fresh")
    assert contents(first.run_dir) == before


def test_ranks_refuse_what_no_launcher_has_seen(first_done: Path, half: Tiny, disk: Path) -> None:
    """On Kubernetes the folder is on a volume; and a folder may be filled after a run has begun."""
    shutil.copytree(first_done / "disk/step-00000012", disk / "step-00000012")
    said = stranger_refused(half, disk, f"train.steps={STEPS}")
    assert mentions(said, "step-00000012", "first", "seed 7", "0")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    disk, tiny = tmp_path / "disk", project_with_disk(tmp_path)
    with tiny.start("run", "run.yaml", "train.steps=100000", "checkpoint.every_steps=1000000") as running:
        wait_until((disk / ".run.lock").exists, alive=lambda: running.poll() is None)
        done = tiny.command("run", "run.yaml", "name=other")
        running.terminate()
        running.communicate(timeout=PATIENCE)
    assert done.code == 2, done.said
    assert mentions(done.said, str(disk), "in use", str(tiny.run_dir))
    assert tiny.command("run", "run.yaml", "train.steps=100000", "--detach").code == 0, "the run itself continues"
    assert tiny.command("cancel", "tiny").code == 0


def test_a_copied_run_is_refused_the_folder_of_the_original(half: Tiny, disk: Path) -> None:
    copy = half.run_dir.with_name("copy")
    shutil.copytree(half.run_dir, copy)
    before = contents(disk)
    done = half.command("resume", "copy", f"train.steps={STEPS}")
    assert done.code == 2, done.said
    assert mentions(done.said, str(half.run_dir), str(copy), "copy")
    assert contents(disk) == before
    shutil.rmtree(half.run_dir)
    assert half.command("resume", "copy", f"train.steps={STEPS}").code == 0, "now it is the only one"


def test_copied_checkpoints_in_a_run_directory(first_done: Path, tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", f"train.steps={HALF}").code == 0
    step = tiny.run_dir / "checkpoints/step-00000012"
    shutil.copytree(first_done / "disk/step-00000012", step)
    done = tiny.command("run", "run.yaml", f"train.steps={STEPS}")
    assert done.code == 2, done.said
    assert mentions(done.said, str(step), "first", "move it elsewhere")
    for words in (["export", "tiny"], ["export", "tiny", "--step", "12"]):
        done = tiny.command(*words)
        assert done.code == 2, done.said
        assert mentions(done.said, str(step), "first")
    shutil.rmtree(step)
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS}").code == 0


def test_the_identity_outlives_name_ranks_rate_and_a_lost_plan(half: Tiny, disk: Path) -> None:
    (half.run_dir / "plan.json").unlink()
    changes = ["name=renamed", f"run_dir={half.run_dir}", "train.optimizer.lr=1e-3", "resources.ranks_per_node=2"]
    done = half.command("run", "run.yaml", *changes, "data.micro_batch=2", f"train.steps={STEPS}")
    assert done.code == 0, done.said
    assert [step for step, *_ in curve(half.run_dir)] == list(range(1, STEPS + 1))
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


def test_a_run_of_an_earlier_version_continues(half: Tiny, disk: Path) -> None:
    without_identity(disk)
    plan = json.loads((half.run_dir / "plan.json").read_text())
    del plan["run"], plan["hash"]
    (half.run_dir / "plan.json").write_text(json.dumps(plan))
    assert half.command("resume", "tiny", f"train.steps={STEPS}").code == 0
    assert [step for step, *_ in curve(half.run_dir)] == list(range(1, STEPS + 1))


def test_older_checkpoints_than_the_run_are_not_its_own(
    first_done: Path, half: Tiny, disk: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(first_done / "disk", stranger)
    without_identity(stranger)
    shutil.copytree(stranger / "step-00000012", disk / "step-00000012")
    assert "before this run was submitted" in stranger_refused(half, disk, f"train.steps={STEPS}")


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
