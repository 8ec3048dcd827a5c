"""A full disk: which errors mean it, the message, and the notice that needs no space."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest
from fake_clock import FakeClock
from messages import says

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.system.disk_space import BLOCK, Notice, OutOfDisk, has_room, is_full, out_of_disk, wait_for_room


def raised(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_what_is_a_full_disk() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert is_full(full)
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_full(raised(OrtflowError("it does not start"), full))
    assert not is_full(OSError(errno.EIO, "Input/output error", "/data/x"))
    assert not is_full(UserError("wrong"))
    itself = UserError("wrong")
    assert not is_full(raised(itself, itself))
    assert says(str(out_of_disk(raised(OrtflowError("x"), full), 2_500_000)), "out of disk … /data/x … 2.5 MB")
    assert says(str(out_of_disk(OSError(errno.EDQUOT, "x"), 1, "/there")), "out of disk … /there … 0.1 MB")


def test_a_full_disk_survives_pickling() -> None:
    lack = pickle.loads(pickle.dumps(OutOfDisk(Path("/data"), 7)))
    assert (lack.path, lack.needed_bytes) == (Path("/data"), 7)


def test_a_notice_is_written_into_its_block(tmp_path: Path) -> None:
    notice = Notice(tmp_path / ".heartbeat")
    assert notice.read() is None
    notice.clear()
    assert notice.read() is None
    lack = OutOfDisk(tmp_path / ("d" * 200), 1 << 20)
    notice.report(lack)
    assert (tmp_path / ".heartbeat").stat().st_size == BLOCK
    assert str(Notice(tmp_path / ".heartbeat").read()) == str(lack)
    assert notice.fatal() is None
    notice.report(lack, fatal=True)
    assert str(Notice(tmp_path / ".heartbeat").fatal()) == str(lack)
    notice.clear()
    assert notice.read() is None
    assert notice.fatal() is None
    (tmp_path / "theirs").mkdir()
    Notice(tmp_path / "theirs").report(lack)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_notice_without_its_block_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    notice = Notice(tmp_path / ".heartbeat")
    notice.clear()
    with monkeypatch.context() as refused:
        refused.setattr("os.pwrite", refuse)
        notice.report(OutOfDisk(tmp_path / "checkpoints", 7 << 20))
    assert str(notice.read()) == str(OutOfDisk(tmp_path, 1))
    notice.report(OutOfDisk(tmp_path / "checkpoints", 7 << 20))
    assert str(notice.read()) == str(OutOfDisk(tmp_path / "checkpoints", 7 << 20)), "reported once there is a block"
    notice.clear()
    assert notice.read() is None


def test_a_quota_and_a_disk_elsewhere_are_not_judged_by_a_reader(tmp_path: Path) -> None:
    heartbeat = tmp_path / "run" / ".heartbeat"
    heartbeat.parent.mkdir()
    for lack in (OutOfDisk(heartbeat.parent / "checkpoints", 1), OutOfDisk(tmp_path / "elsewhere", 1 << 60)):
        Notice(heartbeat).report(lack)
        assert str(Notice(heartbeat).read()) == str(lack)
    # Written on a machine that mounts the run directory elsewhere.
    heartbeat.write_text('{"path": "/else/where/run/checkpoints", "needed": 1, "short": true}')
    assert Notice(heartbeat).read() is not None


def test_free_space_is_probed_and_nothing_is_left(tmp_path: Path) -> None:
    assert has_room(tmp_path / "not" / "there", 1 << 16)
    assert list(tmp_path.iterdir()) == []
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert not has_room(tmp_path, free + (1 << 40))
    assert list(tmp_path.iterdir()) == []


def test_a_wait_ends_with_free_space_or_a_request_to_stop(tmp_path: Path) -> None:
    notice, there = Notice(tmp_path / ".heartbeat"), OutOfDisk(tmp_path, 1)
    assert wait_for_room(there, notice, 5.0, lambda: False)
    never = OutOfDisk(tmp_path, 1 << 60)
    assert not wait_for_room(never, notice, 60.0, lambda: True)
    clock = FakeClock()
    assert not wait_for_room(never, notice, 600.0, lambda: False, clock)
    assert sum(clock.sleeps) == pytest.approx(600.0, abs=1.0)
    assert str(notice.read()) == str(never), "the notice stays"
