"""A launcher pod on a full volume: it waits, tells, gives up in time, and leaves when it is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ortflow.launchers.kubernetes import room
from ortflow.launchers.kubernetes.room import await_room
from ortflow.workflow import room as disk
from ortflow.workflow.errors import Preempted
from ortflow.workflow.room import Notice, OutOfDisk
from ortflow.workflow.rundir import RunDir


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk is, for as long as it is not emptied."""
    state = [True]
    for module in (room, disk):
        monkeypatch.setattr(module, "has_room", lambda path, needed: not state)
    return state


def test_room_that_comes(tmp_path: Path, full: list[bool]) -> None:
    run, told = RunDir(tmp_path), list[OutOfDisk]()
    threading.Timer(0.5, full.clear).start()
    begun = time.monotonic()
    await_room(run, 20.0, told.append)
    assert 0.4 < time.monotonic() - begun < 10
    assert [str(one) for one in told] == [f"out of disk on {tmp_path}, 0.1 MB needed"]
    assert Notice(run.heartbeat).read() is None


def test_no_room(tmp_path: Path, full: list[bool]) -> None:
    with pytest.raises(OutOfDisk):
        await_room(RunDir(tmp_path), 0.3, lambda lack: None)
    assert Notice(RunDir(tmp_path).heartbeat).read() is not None


def test_told_to_end(tmp_path: Path, full: list[bool]) -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Preempted):
        await_room(RunDir(tmp_path), 20.0, lambda lack: None)


def test_room_enough(tmp_path: Path) -> None:
    await_room(RunDir(tmp_path), 0.0, lambda lack: pytest.fail("there is room"))
    assert list(tmp_path.iterdir()) == []
