"""Attempts on this machine, with real processes in place of mpirun: ranks are found, asked, killed, and missed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from messages import mentions

from ortflow.launchers import attempt as module
from ortflow.launchers.attempt import Attempt, Child
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.rundir import RunDir

Start = Callable[[str, int], Attempt]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell script as an attempt of so many ranks."""
    started: list[Attempt] = []

    def attempt_of(script: str, world_size: int) -> Attempt:
        kind = None if world_size == 1 else "mpich"
        started.append(Attempt(RunDir(tmp_path / "run"), 0, ["sh", "-c", script], os.environ, world_size, kind))
        return started[-1]

    yield attempt_of
    for attempt in started:
        attempt.kill()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_only_rank_is_the_child(start: Start) -> None:
    attempt = start("exec sleep 60", 1)
    until(lambda: attempt.poll() is None and attempt.ranks)
    assert attempt.ranks[0].pid == attempt.pid
    assert list(attempt.gone()) == []
    attempt.ask_to_leave()
    until(lambda: attempt.poll() is not None)
    assert (attempt.poll(), list(attempt.gone())) == (-15, [0])
    assert attempt.statuses(-15) == {0: -15}


RANKS = "PMI_RANK=0 PMI_SIZE=2 sleep 60 & one=$!; PMI_RANK=1 PMI_SIZE=2 sleep 60 & echo $one; wait"


def test_ranks_below_mpirun_are_asked_and_it_is_not(start: Start) -> None:
    attempt = start(f"trap 'echo asked' TERM; {RANKS}; echo ended", 2)
    until(lambda: attempt.poll() is None and len(attempt.ranks) == 2)
    first = attempt.ranks[0]
    assert attempt.output().strip() == str(first.pid)
    first.kill()
    until(attempt.gone)
    assert list(attempt.gone()) == [0]
    attempt.ask_to_leave()
    until(lambda: attempt.poll() is not None)
    assert attempt.poll() == 0
    assert "asked" not in attempt.output()
    assert sorted(attempt.gone()) == [0, 1]


def test_all_that_mpirun_has_started_is_killed(start: Start) -> None:
    attempt = start(f"sleep 61 & {RANKS}", 2)
    until(lambda: attempt.poll() is None and len(attempt.ranks) == 2)
    members = [psutil.Process(attempt.pid), *psutil.Process(attempt.pid).children(recursive=True)]
    assert len(members) == 4
    attempt.kill()
    assert attempt.poll() == -9
    until(lambda: not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members))


def test_a_rank_that_never_starts_counts_as_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = start("PMI_RANK=0 PMI_SIZE=2 sleep 60 & wait", 2)
    until(lambda: attempt.poll() is None and attempt.ranks)
    assert list(attempt.gone()) == []
    monkeypatch.setattr(module, "UNSEEN", 0.0)
    assert list(attempt.gone()) == [1]


def test_what_cannot_be_started_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "of" / "a" / "run")
    with pytest.raises(OrtflowError) as raised:
        Child(run, 0, ["/missing/mpirun", "-n", "2"], os.environ)
    assert mentions(str(raised.value), "/missing/mpirun", "No such file")
    assert run.launcher_log(0).exists()
