"""A launcher pod on a full volume: it waits, reports, gives up in time, and exits when asked to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fake_clock import FakeClock

from ortflow.launchers.kubernetes import disk_space
from ortflow.launchers.kubernetes.disk_space import await_room
from ortflow.workflow.errors import Preempted
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system import disk_space as disk
from ortflow.workflow.system.disk_space import Notice, OutOfDisk


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that is nonempty while the disk is full."""
    state = [True]
    for module in (disk_space, disk):
        monkeypatch.setattr(module, "has_room", lambda path, needed: not state)
    return state


def test_space_that_is_freed(tmp_path: Path, full: list[bool]) -> None:
    run, reported = RunDir(tmp_path), list[OutOfDisk]()
    clock = FakeClock()
    begun = clock.now
    clock.after(300.0, full.clear)
    await_room(run, 600.0, reported.append, clock)
    assert clock.now - begun == pytest.approx(300.0, abs=1.0)
    assert [str(one) for one in reported] == [f"out of disk on {tmp_path}, 0.1 MB needed"]
    assert Notice(run.heartbeat).read() is None


def test_no_space(tmp_path: Path, full: list[bool]) -> None:
    with pytest.raises(OutOfDisk):
        await_room(RunDir(tmp_path), 600.0, lambda lack: None, FakeClock())
    assert Notice(RunDir(tmp_path).heartbeat).read() is not None


def test_asked_to_end(tmp_path: Path, full: list[bool]) -> None:
    clock = FakeClock()
    clock.after(300.0, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Preempted):
        await_room(RunDir(tmp_path), 600.0, lambda lack: None, clock)
    assert sum(clock.sleeps) < 301.0


def test_enough_space(tmp_path: Path) -> None:
    await_room(RunDir(tmp_path), 0.0, lambda lack: pytest.fail("there is space"))
    assert list(tmp_path.iterdir()) == []
