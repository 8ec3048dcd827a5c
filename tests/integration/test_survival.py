"""What a restart finds, and what a run survives: damaged checkpoints, a full disk, NaN losses."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from project import ORTFLOW, Project, command, curve, environment, logs, of_kind

from ortflow.launchers.supervision.processes import family, ranks_among
from ortflow.workflow.run.rundir import RunDir

pytestmark = pytest.mark.rotates("survival")

ALONE = {"resources__ranks_per_node": 1, "resources__cpus_per_rank": 1}
FAULTS = Path(__file__).parent.parent / "support" / "faults"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Path:
    return project.run("undisturbed", **ALONE)


def damage(run_dir: Path, step: int, how: str) -> Path:
    """Damage the checkpoint of a step; the name that a reader must report."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    rank = folder / "rank-0000.safetensors"
    if how == "truncated":
        os.truncate(rank, rank.stat().st_size // 2)
        return rank
    if how == "bit flipped":
        data = bytearray(rank.read_bytes())
        data[len(data) // 3] ^= 4
        rank.write_bytes(data)
        return rank
    missing = folder / {"no rank file": rank.name, "no manifest": "manifest.json", "no marker": "COMMITTED"}[how]
    missing.unlink()
    return missing


@pytest.mark.parametrize("how", ["truncated", "bit flipped", "no rank file", "no manifest", "no marker"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    project: Project, undisturbed: Path, how: str
) -> None:
    name = f"damaged-{how.replace(' ', '-')}"
    short = {"train__schedule": {"name": "constant"}, "train__steps": 20, **ALONE}
    run_dir = project.run(name, **short)
    whole = project.run_dir("constant")
    if not whole.exists():
        project.run("constant", **{**short, "train__steps": 30})
    blamed = damage(run_dir, 20, how)
    project.run(name, **{**short, "train__steps": 30})
    (rejected,) = of_kind(run_dir, "checkpoint_rejected")
    assert Path(rejected["path"]) == blamed
    assert rejected["reason"]
    assert [r["step"] for r in of_kind(run_dir, "resume")] == [15]
    assert curve(run_dir) == curve(whole)


def test_a_full_disk_leaves_the_run_and_the_old_checkpoint(project: Project, tmp_path: Path) -> None:
    """A file system with space for the first checkpoint but not for the third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        file = project.write(
            "full",
            **ALONE,
            checkpoint__directory=str(disk / "checkpoints"),
            checkpoint__keep={"newest": 9},
            checkpoint__wait_for_room=1.0,
            restart={"failures": 0},
        )
        done = command("run", file.name, folder=project.folder)
        run_dir = project.run_dir("full")
        failed = of_kind(run_dir, "checkpoint_failed")
        assert failed, done.stdout
        assert "disk" in failed[0]["reason"] or "space" in failed[0]["reason"]
        assert [step for step, *_ in curve(run_dir)] == list(range(1, 31)), "the run continued"
        kept = [r["step"] for r in of_kind(run_dir, "checkpoint")]
        assert kept
        assert kept[0] == 5
        verified = command("checkpoint", "verify", str(disk / "checkpoints"), folder=project.folder)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert done.returncode == 1, "a run whose end cannot be saved is not done"
        assert "could not be saved" in done.stdout + done.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_steps_without_a_usable_gradient_are_skipped_and_then_end_the_run(project: Project) -> None:
    changes = {
        **ALONE,
        "train__optimizer": {"name": "sgd", "lr": 1e30},
        "train__schedule": {"name": "constant"},
        "train__clip_norm": None,
        "train__max_skipped_steps": 4,
        "train__evaluation": {},
    }
    file = project.write("diverges", **changes)
    done = command("run", file.name, folder=project.folder)
    run_dir = project.run_dir("diverges")
    assert done.returncode == 2, done.stdout + done.stderr + logs(run_dir)
    skipped = of_kind(run_dir, "skipped_step")
    assert len(skipped) == 4
    assert "4 steps in a row" in done.stdout + done.stderr
    assert "train.optimizer.lr" in done.stdout + done.stderr
    assert of_kind(run_dir, "step")[-1]["loss"] is None


def test_a_rank_that_hangs_is_started_again(project: Project) -> None:
    """One of two ranks freezes, the other waits for it in an all-reduce: no process dies, and nothing progresses."""
    whole = project.run("whole")
    file = project.write("hangs", restart={"failures": 1, "hung_seconds": 15.0, "backoff": {"first": 0.0}})
    run_dir = project.run_dir("hangs")
    # A step of this model takes less than a millisecond: without it, the run can end before the process is found.
    slow = environment(PYTHONPATH=str(FAULTS), SLOW="0.2 1")
    with subprocess.Popen([*ORTFLOW, "run", file.name], cwd=project.folder, env=slow) as launcher:
        stopped = None
        while stopped is None and launcher.poll() is None:
            ranks = ranks_among(family(psutil.Process(launcher.pid))) if checkpointed(run_dir) else {}
            stopped = ranks.get(1)
            time.sleep(0.05)
        assert stopped is not None, logs(run_dir)
        stopped.suspend()
        assert launcher.wait(120) == 0, logs(run_dir)
    (end,) = [record for record in RunDir(run_dir).read_attempts() if record.get("outcome") == "failure"]
    assert "hung: no heartbeat for 15 s; rank 0 waits for other ranks in all_reduce" in end["cause"]
    assert "; rank 1 does not respond" in end["cause"]
    assert curve(run_dir) == curve(whole)


def checkpointed(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / "step-00000010").exists()


def test_tensorboard_opens_the_scalars(undisturbed: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = accumulator.EventAccumulator(str(undisturbed / "tensorboard"))
    scalars.Reload()
    tags = scalars.Tags()["scalars"]
    assert {"loss", "lr", "grad_norm", "samples_per_second", "eval/loss", "eval/accuracy"} <= set(tags)
    assert "checkpoint_stall_seconds" in tags
    shown = {event.step: event.value for event in scalars.Scalars("loss")}
    assert shown == {step: np.float32(loss) for step, loss, *_ in curve(undisturbed)}


def test_early_stop_ends_a_run(project: Project) -> None:
    run_dir = project.run(
        "early", **ALONE, train__evaluation={"every_steps": 2}, train__optimizer={"name": "adamw", "lr": 1e-9},
        train__early_stop={"metric": "loss", "patience": 2, "min_delta": 0.5},
    )  # fmt: skip
    assert [r["step"] for r in of_kind(run_dir, "early_stop")] == [6]
    assert [step for step, *_ in curve(run_dir)][-1] == 6
    assert (run_dir / "export" / "model.onnx").exists()
    again = command("resume", "early", folder=project.folder)
    assert "train longer with `ortflow resume early train.early_stop.patience=4`" in again.stdout
    more = command("resume", "early", "train.early_stop.patience=4", folder=project.folder)
    assert more.returncode == 0, more.stderr
    assert [r["step"] for r in of_kind(run_dir, "early_stop")] == [6, 10]
    assert [step for step, *_ in curve(run_dir)] == list(range(1, 11))


def test_export_offline_from_an_older_checkpoint(project: Project, undisturbed: Path, tmp_path: Path) -> None:
    listed = command("checkpoint", "list", str(undisturbed), "--json", folder=project.folder)
    assert listed.returncode == 0, listed.stderr
    same = command("export", str(undisturbed), "--output", str(tmp_path / "same.onnx"), folder=project.folder)
    assert same.returncode == 0, same.stderr
    assert (tmp_path / "same.onnx").read_bytes() == (undisturbed / "export" / "model.onnx").read_bytes()
    older = command(
        "export", str(undisturbed), "--step", "25", "--output", str(tmp_path / "old.onnx"), folder=project.folder
    )
    assert older.returncode == 0, older.stderr
    assert (tmp_path / "old.onnx").read_bytes() != (tmp_path / "same.onnx").read_bytes()
    none = command("export", str(undisturbed), "--step", "7", folder=project.folder)
    assert none.returncode == 2
    assert "no checkpoint of step 7" in none.stderr


def test_every_optimizer_and_accumulation_resume_exactly(project: Project) -> None:
    for optimizer in (
        {"name": "adam", "lr": 1e-3, "weight_decay": 0.01},
        {"name": "lamb", "lr": 1e-2, "weight_decay": 0.01},
        {"name": "sgd", "lr": 1e-1, "momentum": 0.9, "nesterov": True},
    ):
        changes = {
            **ALONE, "train__optimizer": optimizer, "train__gradient_accumulation": 2, "train__clip_norm": None,
            "train__schedule": {"name": "constant"}, "checkpoint__every_steps": 4, "data__micro_batch": 2,
        }  # fmt: skip
        name = str(optimizer["name"])
        whole = project.run(f"{name}-whole", **changes, train__steps=14)
        project.run(f"{name}-parts", **changes, train__steps=6)
        parts = project.run(f"{name}-parts", **changes, train__steps=14)
        assert [r["step"] for r in of_kind(parts, "resume")] == [6]
        assert curve(parts) == curve(whole), name
        assert curve(whole)[-1][1] < curve(whole)[0][1], name
    shutil.rmtree(project.run_dir("sgd-whole"))
