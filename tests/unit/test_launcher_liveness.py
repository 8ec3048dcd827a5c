"""Liveness is detected by changes, not by comparing clocks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from signal_handlers import restored

from ortflow.launchers.attempts.liveness import START, FileChanges, Liveness
from ortflow.launchers.budget import MOST_WITHOUT_STEP
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision.supervised import Job, Running
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.workflow.errors import EXIT_FAILURE, OrtflowError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.restart import Restart

HOURS = 7200 * 10**9


def touch(path: Path, nanoseconds: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, ns=(nanoseconds, nanoseconds))


@pytest.mark.parametrize("start", [0, HOURS, 1_800_000_000 * 10**9 + HOURS])
def test_times_that_move_count_whatever_they_are(tmp_path: Path, start: int) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    touch(one, start)
    moves = FileChanges([one, other], now=100.0)
    assert moves.quiet(100.0) == 0
    assert moves.quiet(150.0) == 50
    touch(one, start - 10**9)  # set back
    assert moves.quiet(160.0) == 0
    assert moves.quiet(170.0) == 10
    other.touch()
    assert moves.quiet(180.0) == 0


class Silence:
    """A view that shows nothing."""

    def record(self, record: Any) -> None: ...
    def message(self, text: str) -> None: ...
    def attempt(self, number: int) -> None: ...
    def tick(self) -> None: ...


def starts_again(root: Path, *, hands_back: bool = True) -> bool:
    """Whether a supervisor that finds a lost attempt starts the next one."""
    run, started = RunDir(root), list[int]()

    def start(number: int) -> Running:
        started.append(number)
        raise OrtflowError("not in this test")

    job = Job(run, 3, Restart(), start, lambda: None, hands_back=hands_back)
    with suppress(OrtflowError):
        assert Supervisor(job, Silence(), Stop(run.stop_request)).supervise() == EXIT_FAILURE
    return bool(started)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with restored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


def test_ranks_are_alive_while_one_of_them_writes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for path in (run.heartbeat, run.events(0), run.events(2), run.launcher_log(0)):
        touch(path, 1)
    silent = Liveness(run, 0, 3, 100.0, 1000.0).hung
    assert not silent(1099.0)
    touch(run.events(2), 2)
    assert not silent(1106.0)
    assert not silent(1190.0), "rank 2 has written"
    assert silent(1210.0) == "the ranks hung: no heartbeat for 100 s"
    touch(run.heartbeat, 2)
    assert not silent(1211.0)


def test_rank_0_is_alive_while_it_records(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for path in (run.heartbeat, run.events(0)):
        touch(path, 1)
    silent = Liveness(run, 0, 1, 100.0, 1000.0).hung
    touch(run.events(0), 2)
    assert not silent(1090.0)
    assert not silent(1190.0), "the limit, not beyond it"
    assert silent(1190.5)


@pytest.mark.parametrize("limit", [10.0, 300.0])
def test_ranks_that_start_have_time_until_the_first_heartbeat(tmp_path: Path, limit: float) -> None:
    """Also where a heartbeat of the attempt before is left, and where mpirun prints something."""
    run = RunDir(tmp_path)
    touch(run.heartbeat, 1)
    silent = Liveness(run, 0, 2, limit, 1000.0).hung
    touch(run.launcher_log(0), 1)
    assert not silent(1001.0)
    given = max(limit, START)
    assert given == max(limit, 120.0), "what docs/launchers.md promises"
    assert not silent(1001.0 + given)
    assert silent(1002.0 + given) == f"the ranks did not start: no heartbeat for {given:g} s"
    touch(run.heartbeat, 2)
    assert not silent(1003.0 + given)
    assert silent(1004.0 + given + limit) == f"the ranks hung: no heartbeat for {limit:g} s"


def test_lost_attempts_without_a_step_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in range(MOST_WITHOUT_STEP + 1):
        run.record_attempt(event="start", attempt=number)
        assert starts_again(tmp_path) == (number < MOST_WITHOUT_STEP)
    last = run.read_attempts()[-1]
    assert (last["outcome"], last["next"]) == ("lost", "stop")
    assert "5 attempts in a row" in last["why"]


def test_a_user_may_start_any_number_of_times(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in range(3 * MOST_WITHOUT_STEP):
        run.record_attempt(event="start", attempt=number)
        assert starts_again(tmp_path, hands_back=False)
