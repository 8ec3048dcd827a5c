"""A quota that is used up during a run, on a file system with free space: btrfs, whose kernel returns EDQUOT."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disks import LONG, ends_undisturbed, fill, until_reported, wait_for_step
from tiny_runs import Tiny, has_traceback, is_root

from ortflow.launchers.records import State
from ortflow.workflow.system.disk_space import Notice, OutOfDisk, has_room

pytestmark = pytest.mark.rotates("quotas")

LIMIT = 8 << 20


def btrfs(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def quota(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a quota of 8 MiB on a file system of 2 GiB."""
    if not is_root() or shutil.which("mkfs.btrfs") is None:
        pytest.skip("a file system with a quota needs root and mkfs.btrfs")
    image, place = tmp_path_factory.mktemp("image") / "disk", tmp_path_factory.mktemp("mount")
    with image.open("wb") as file:
        file.truncate(2 << 30)
    if not (btrfs("mkfs.btrfs", "-q", str(image)) and btrfs("mount", "-o", "loop", str(image), str(place))):
        pytest.skip("btrfs cannot be mounted here")
    try:
        limited = str(place / "limited")
        for command in (["quota", "enable", str(place)], ["subvolume", "create", limited]):
            assert btrfs("btrfs", *command)
        assert btrfs("btrfs", "qgroup", "limit", str(LIMIT), limited)
        yield Path(limited)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def folder(quota: Path) -> Iterator[Path]:
    (quota / "p").mkdir()
    yield quota / "p"
    subprocess.run(["rm", "-rf", str(quota / "filler"), str(quota / "p")], check=True)
    subprocess.run(["btrfs", "filesystem", "sync", str(quota)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny.make(tmp_path_factory.mktemp("whole"), **LONG)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    return tiny.run_dir


def test_free_space_is_what_the_quota_leaves(quota: Path, folder: Path) -> None:
    assert shutil.disk_usage(folder).free > 10 * LIMIT, "the file system does not know the quota"
    assert has_room(folder, LIMIT // 2)
    assert not has_room(folder, 2 * LIMIT)
    assert os.listdir(folder) == []
    (found,) = (line for line in Tiny.make(folder).command("doctor", "run.yaml").out.splitlines() if "btrfs" in line)
    assert found.startswith("warning")
    assert "a quota allows less than 100 MB" in found
    fill(quota)
    assert not has_room(folder, 1)


def test_a_notice_needs_no_disk_space(quota: Path, folder: Path) -> None:
    notice = Notice(folder / ".heartbeat")
    notice.clear()
    filler = fill(quota)
    notice.report(OutOfDisk(folder, 1 << 20))
    assert "out of disk on" in str(Notice(folder / ".heartbeat").read())
    filler.unlink()
    subprocess.run(["btrfs", "filesystem", "sync", str(quota)], check=True, capture_output=True)
    notice.report(OutOfDisk(folder, 3 << 20))
    assert "3.1 MB needed" in str(notice.read())
    notice.clear()
    assert notice.read() is None


@pytest.mark.parametrize("step", [1, 450])
def test_a_quota_that_is_raised_in_time_costs_nothing(quota: Path, folder: Path, whole: Path, step: int) -> None:
    tiny = Tiny.make(folder, **LONG)
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, step, child)
    filler = fill(quota)
    how = until_reported(tiny, child)
    assert how.state is State.RUNNING
    assert f"out of disk on {tiny.run_dir}" in str(how.waits)
    assert "out of disk on" in tiny.command("list").out
    filler.unlink()
    ends_undisturbed(tiny, child, whole, 120)


def test_a_quota_that_stays_used_up_ends_the_run_once_with_one_sentence(quota: Path, folder: Path) -> None:
    tiny = Tiny.make(folder, **{**LONG, "checkpoint": {**LONG["checkpoint"], "wait_for_room": 2}})
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, 450, child)
    filler = fill(quota)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 1, out + err
    assert not has_traceback(out + err)
    (line,) = err.splitlines()
    assert "out of disk on" in line
    exported = tiny.command("export", "tiny", "--output", "other.onnx")
    assert exported.code == 1, exported.said
    assert not has_traceback(exported.said)
    assert "out of disk on" in exported.err
    filler.unlink()
    again = tiny.command("resume", "tiny")
    assert again.code == 0, again.said


def test_a_run_without_any_quota_left_leaves_nothing(quota: Path, folder: Path) -> None:
    tiny = Tiny.make(folder)
    fill(quota)
    done = tiny.command("run", "run.yaml")
    assert done.code == 1, done.said
    assert not has_traceback(done.said)
    assert "out of disk on" in done.err
    assert not (tiny.run_dir / "run.yaml").exists()
