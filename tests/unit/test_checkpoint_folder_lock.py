"""The lock of a folder of checkpoints: which run may use it, after which other one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

from ortflow.workflow.checkpoint import folder_lock
from ortflow.workflow.checkpoint.checkpoint_names import LOCK
from ortflow.workflow.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "checkpoints"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "runs" / "a", "id-a")


def run_directory(path: Path, run: str) -> Path:
    path.mkdir(parents=True)
    (path / "plan.json").write_text(json.dumps({"run": {"id": run}}))
    return path


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / LOCK).read_text())
    return found


def is_locked(folder: Path) -> bool:
    with (folder / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def open_files(folder: Path) -> list[str]:
    """Those in a folder: threads of earlier tests open and close others at any moment."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, and what other threads close
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(link for link in links if Path(link).is_relative_to(folder.resolve()))


def test_the_first_run_takes_a_new_folder_and_is_named_in_it(folder: Path, root: Path) -> None:
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    assert record(folder) == {"run_dir": str(root), "id": "id-a", "pid": os.getpid()}
    assert is_locked(folder)
    os.close(descriptor)
    assert not is_locked(folder)


def test_a_folder_is_taken_over_from_a_run_that_has_ended(folder: Path, root: Path) -> None:
    folder.mkdir(parents=True)
    (folder / LOCK).write_text(json.dumps({"run_dir": "/gone/" + "long" * 99, "id": "id-b", "pid": 1}))
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    assert record(folder)["id"] == "id-a"
    os.close(descriptor)


@pytest.mark.parametrize("run", ["id-b", "id-a"])
def test_two_directories_do_not_use_a_folder_at_the_same_time(
    folder: Path, root: Path, tmp_path: Path, run: str
) -> None:
    """Also if the second one is a copy of the first."""
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    other, before = run_directory(tmp_path / "runs" / "b", run), open_files(tmp_path)
    with pytest.raises(UserError) as refused:
        folder_lock.hold(folder, other, run)
    assert mentions(str(refused.value), str(folder), "in use", str(root))
    assert refused.value.where == "checkpoint.directory"
    assert record(folder)["run_dir"] == str(root)
    assert open_files(tmp_path) == before
    os.close(descriptor)


def test_an_attempt_does_not_wait_for_an_earlier_one_of_its_run(folder: Path, root: Path, tmp_path: Path) -> None:
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    before = open_files(tmp_path)
    assert folder_lock.hold(folder, root, "id-a") is None
    assert open_files(tmp_path) == before
    os.close(descriptor)


def test_a_copy_does_not_continue_in_the_folder_of_the_original(folder: Path, root: Path, tmp_path: Path) -> None:
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    os.close(descriptor)
    copy = run_directory(tmp_path / "runs" / "copy", "id-a")
    with pytest.raises(UserError) as refused:
        folder_lock.hold(folder, copy, "id-a")
    assert mentions(str(refused.value), str(root), str(copy), "a copy")
    assert refused.value.where == "checkpoint.directory"
    assert not is_locked(folder)


@pytest.mark.parametrize("there", ["nothing", "another run", "a link", "no plan", "a list"])
def test_a_renamed_run_directory_continues_in_its_folder(folder: Path, root: Path, tmp_path: Path, there: str) -> None:
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    os.close(descriptor)
    root.rename(renamed := tmp_path / "runs" / "renamed")
    if there == "another run":
        run_directory(root, "id-b")
    elif there == "a link":
        root.symlink_to(renamed)
    elif there != "nothing":
        root.mkdir()
        if there == "a list":
            (root / "plan.json").write_text('{"run": ["id-a"]}')
    descriptor = folder_lock.hold(folder, renamed, "id-a")
    assert descriptor is not None
    assert record(folder)["run_dir"] == str(renamed)
    os.close(descriptor)


@pytest.mark.parametrize("damage", ["", "[]", "{", "[" * 100_000, '{"run_dir": 1, "id": "id-a"}'])
def test_a_damaged_record_refuses_nobody(folder: Path, root: Path, damage: str) -> None:
    folder.mkdir(parents=True)
    (folder / LOCK).write_text(damage)
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    assert record(folder)["run_dir"] == str(root)
    os.close(descriptor)


def test_a_held_lock_without_a_record_is_of_another_directory(folder: Path, root: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by the run in another directory"):
            folder_lock.hold(folder, root, "id-a")


def test_a_folder_that_cannot_be_written_is_reported_by_the_saves(folder: Path, root: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert folder_lock.hold(folder, root, "id-a") is None
    folder.unlink()
    folder.mkdir()
    (folder / LOCK).symlink_to(root / "elsewhere")
    assert folder_lock.hold(folder, root, "id-a") is None
    assert not (root / "elsewhere").exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = open_files(folder)
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)):
            folder_lock.hold(folder, root, "id-a")
        assert open_files(folder) == before
        return
    descriptor = folder_lock.hold(folder, root, "id-a")
    assert descriptor is not None
    assert record(folder)["id"] == "id-a"
    os.close(descriptor)
