"""Attempts on this machine, with real processes in place of mpirun: ranks are found, asked, killed, and missed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from messages import mentions
from waits import wait_until

from ortflow.launchers.attempts.mpi_abort import ended_by_mpi
from ortflow.launchers.supervision import attempt as module
from ortflow.launchers.supervision.attempt import Attempt, Child, RankCommand
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir

Start = Callable[[str, int], Attempt]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a shell script as an attempt of so many ranks."""
    started: list[Attempt] = []

    def attempt_of(script: str, world_size: int) -> Attempt:
        kind = None if world_size == 1 else "mpich"
        command = RankCommand(RunDir(tmp_path / "run"), 0, ["sh", "-c", script], os.environ)
        started.append(Attempt(command, world_size, kind))
        return started[-1]

    yield attempt_of
    for attempt in started:
        attempt.kill()


def test_the_only_rank_is_the_child(start: Start) -> None:
    attempt = start("exec sleep 60", 1)
    wait_until(lambda: attempt.poll() is None and attempt.ranks)
    assert attempt.ranks[0].pid == attempt.pid
    assert list(attempt.gone()) == []
    attempt.ask_to_leave()
    wait_until(lambda: attempt.poll() is not None)
    assert (attempt.poll(), list(attempt.gone())) == (-15, [0])
    assert attempt.statuses(-15) == {0: -15}


RANKS = "PMI_RANK=0 PMI_SIZE=2 sleep 60 & one=$!; PMI_RANK=1 PMI_SIZE=2 sleep 60 & echo $one; wait"


def test_ranks_below_mpirun_are_asked_and_it_is_not(start: Start) -> None:
    attempt = start(f"trap 'echo asked' TERM; {RANKS}; echo ended", 2)
    wait_until(lambda: attempt.poll() is None and len(attempt.ranks) == 2)
    first = attempt.ranks[0]
    wait_until(attempt.output)  # the shell prints it when it has started both
    assert attempt.output().strip() == str(first.pid)
    first.kill()
    wait_until(attempt.gone)
    assert list(attempt.gone()) == [0]
    attempt.ask_to_leave()
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == 0
    assert "asked" not in attempt.output()
    assert sorted(attempt.gone()) == [0, 1]


def test_all_that_mpirun_has_started_is_killed(start: Start) -> None:
    attempt = start(f"sleep 61 & {RANKS}", 2)
    wait_until(lambda: attempt.poll() is None and len(attempt.ranks) == 2)
    members = [psutil.Process(attempt.pid), *psutil.Process(attempt.pid).children(recursive=True)]
    assert len(members) == 4
    attempt.kill()
    assert attempt.poll() == -9
    wait_until(lambda: not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members))


def test_a_rank_that_never_starts_counts_as_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = start("PMI_RANK=0 PMI_SIZE=2 sleep 60 & wait", 2)
    wait_until(lambda: attempt.poll() is None and attempt.ranks)
    assert list(attempt.gone()) == []
    monkeypatch.setattr(module, "UNSEEN", 0.0)
    assert list(attempt.gone()) == [1]


def test_what_cannot_be_started_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "of" / "a" / "run")
    with pytest.raises(OrtflowError) as raised:
        Child(RankCommand(run, 0, ["/missing/mpirun", "-n", "2"], os.environ))
    assert mentions(str(raised.value), "/missing/mpirun", "No such file")
    assert run.launcher_log(0).exists()


MPI_ERROR = "Abort(1090959) on node 0 (rank 0 in comm 0): Fatal error in internal_Allreduce: Other MPI error"


def test_the_rank_whose_end_made_mpi_end_the_others_is_named(start: Start, tmp_path: Path) -> None:
    """mpirun of MPICH 5.0 then ends with 143, the low byte of the code, and reports the status of no rank."""
    logs = tmp_path / "run" / "logs" / "attempt-00"
    opened = f"exec 3>{logs}/rank-0000.log 4>{logs}/rank-0001.log"
    attempt = start(f"{opened}; exec 4>&-; echo '{MPI_ERROR}, error stack:' >&3; exec 3>&-; exit 143", 2)
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.statuses(143) == {}
    cause = attempt.guess(143)
    assert cause is not None
    assert (cause.rank, cause.exit_code) == (1, 143)
    assert mentions(cause.sentence, "rank 1 ended without a report", "MPI on rank 0", "Other MPI error")


@pytest.mark.parametrize(
    ("order", "logs", "expected_rank", "expected_text"),
    [
        ((0, 1), {0: MPI_ERROR, 1: ""}, 0, "MPI on rank 0 ended all ranks"),
        ((), {0: "", 1: f"step 3\n{MPI_ERROR}\nerror stack:\n"}, 1, "MPI on rank 1 ended all ranks"),
        ((2, 0, 1), {0: MPI_ERROR, 1: MPI_ERROR, 2: "step 3"}, 2, "rank 2 ended without a report; then MPI on rank 0"),
        ((0, 1), {0: "Abort(1) was printed by a program", 1: ""}, None, ""),
    ],
)
def test_an_end_of_all_ranks_by_mpi(
    order: tuple[int, ...], logs: dict[int, str], expected_rank: int | None, expected_text: str
) -> None:
    cause = ended_by_mpi(143, order, logs)
    assert (cause.rank if cause else None) == expected_rank
    assert expected_text in (cause.sentence if cause else "")
