"""A run directory on a disk that is full, or on which the user has used up a quota."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ENDS, Cluster, Run, halted, same_end, slow
from conftest import QUICK, start, stop
from full_disks import fill
from project import Project, of_kind
from testbed import FINAL, Testbed, wait_until

LATER = {"backends__slurm__begin": "now+1hour"}
NOTICED = 60.0
"""Seconds until a run has come to where it has to write a checkpoint, and has said what it lacks."""


@pytest.mark.chaos
def test_submit_on_a_full_disk(on_small_disk: Cluster, small_disk: Path) -> None:
    """Nothing is half done, and nothing is in the queue; a run that waits already is still seen."""
    waits = on_small_disk.submit("waits", **LATER)
    file = on_small_disk.write("no-room", **LATER)
    ballast = fill(small_disk)
    try:
        done = on_small_disk.ortflow("submit", "-b", "slurm", file.name)
        assert done.returncode == 1, done.stdout
        assert done.stderr.startswith("error: out of disk on "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert not on_small_disk.project.run_dir("no-room").exists()
        assert on_small_disk.testbed.reported("squeue", "-h", "-o", "%A").split() == [waits.job]
        assert waits.status()["state"] == "pending"
        assert waits.job in on_small_disk.ortflow("list").stdout
    finally:
        ballast.unlink()
    assert on_small_disk.ortflow("submit", "-b", "slurm", file.name).returncode == 0


def until_reported(run: Run) -> str:
    """Wait until status says what is lacking, with the place; its words."""
    reported: list[str] = []

    def there() -> bool:
        reported.append(run.status()["waits"] or "")
        return "out of disk on" in reported[-1]

    wait_until(there, NOTICED, lambda: f"{reported[-1]}\n{run.transcript()}")
    assert f"out of disk on {run.run_dir}" in reported[-1]
    assert "MB needed" in reported[-1]
    return reported[-1]


@pytest.mark.chaos
def test_a_disk_that_is_freed_in_time_costs_nothing(on_small_disk: Cluster, small_disk: Path, undisturbed: Run) -> None:
    run = on_small_disk.submit("full", **slow(0.3))
    run.until_step(7)
    ballast = fill(small_disk)
    until_reported(run)
    assert "out of disk on" in on_small_disk.ortflow("list").stdout
    ballast.unlink()
    run.finish()
    assert run.status()["waits"] is None
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]


@pytest.mark.chaos
def test_ranks_that_start_on_a_full_disk_report_it(on_small_disk: Cluster, small_disk: Path, undisturbed: Run) -> None:
    """One fails and Slurm kills the others, by when there is room again: the disk was the cause, not the signal."""
    run = on_small_disk.submit("full-at-start", **slow(0.3))
    run.until_step(7)
    run.testbed.reported("scontrol", "requeue", run.job)
    wait_until(lambda: len(run.records("start")) == 2, ENDS, run.transcript)
    ballast = fill(small_disk)
    until_reported(run)
    ballast.unlink()
    run.finish()
    same_end(run, undisturbed)
    causes = [end["cause"] for end in run.records("end") if end["outcome"] == "failure"]
    assert all(cause.startswith("out of disk on") for cause in causes), f"{causes}\n{run.transcript()}"
    assert run.status()["failures"] == 0


@pytest.mark.chaos
def test_no_room_for_the_export_and_the_wait_runs_out(
    on_small_disk: Cluster, small_disk: Path, undisturbed: Run
) -> None:
    """All is trained and saved by then; once there is room, resume has only the export to do."""
    run = on_small_disk.submit("no-export", checkpoint__wait_for_room=5.0, **halted("checkpoint", 40, 20.0))
    wait_until(lambda: any(record["step"] == 40 for record in saved(run)), ENDS, run.transcript)
    ballast = fill(small_disk)
    until_reported(run)
    wait_until(lambda: run.testbed.state(run.job) in FINAL, ENDS, run.transcript)
    reported = run.status()
    ballast.unlink()
    assert reported["state"] in ("failed", "lost"), reported
    assert "out of disk on" in f"{reported['cause']}{reported['waits']}", f"{reported}\n{run.transcript()}"
    reported = run.status()
    assert reported["state"] in ("failed", "lost"), reported
    assert "out of disk on" in f"{reported['cause']}", f"{reported}\n{run.transcript()}"
    done = on_small_disk.ortflow("resume", "no-export")
    assert done.returncode == 0, done.stderr
    run.finish()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind")


def saved(run: Run) -> list[dict[str, int]]:
    """The checkpoints on record."""
    return of_kind(run.run_dir, "checkpoint") if (run.run_dir / "events/rank-0000.jsonl").exists() else []


LIMIT = 16 << 20


@pytest.fixture
def with_quota(project: Project, cluster: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The project in a folder for 16 MiB on btrfs, whose kernel says EDQUOT; a testbed whose nodes see that."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("a file system with a quota needs mkfs.btrfs")
    image, place = tmp_path_factory.mktemp("image") / "disk", tmp_path_factory.mktemp("quota")
    with image.open("wb") as file:
        file.truncate(2 << 30)
    limited = place / "limited"
    for command in (
        ("mkfs.btrfs", "-q", image), ("mount", "-o", "loop", image, place), ("btrfs", "quota", "enable", place),
        ("btrfs", "subvolume", "create", limited), ("btrfs", "qgroup", "limit", LIMIT, limited),
    ):  # fmt: skip
        if subprocess.run([*map(str, command)], check=False, capture_output=True).returncode:
            pytest.skip("btrfs cannot be mounted here")
    folder = limited / "project"
    folder.mkdir()
    shutil.copy(project.folder / "model.onnx", folder)
    shutil.copytree(project.folder / "set", folder / "set")
    port = 18000 + os.getpid() % 100 * 10
    testbed = start(Path(f"/var/tmp/ortflow-slurm-quota-{port}"), port, [tmp_path_factory.getbasetemp(), place], *QUICK)
    try:
        yield Cluster(testbed, Project(folder))
    finally:
        stop(testbed)
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.chaos
def test_a_quota_that_is_used_up(with_quota: Cluster, undisturbed: Run) -> None:
    run = with_quota.submit("quota", **slow(0.5))
    run.until_step(7)
    ballast = fill(run.cluster.project.folder.parent)
    until_reported(run)
    ballast.unlink()
    subprocess.run(["btrfs", "filesystem", "sync", str(ballast.parent)], check=True, capture_output=True)
    run.finish()
    assert run.status()["waits"] is None
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]
