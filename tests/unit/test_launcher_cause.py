"""Why an attempt ended, from real output of the two MPIs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from messages import mentions

from ortflow.launchers.attempts.cause import agreed, cause, statuses
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervision.attempt import Attempt, RankCommand
from ortflow.workflow.errors import signal_name
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir

HYDRA_KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 6736 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
[mpiexec@vm] Exit codes: [vm] {codes}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
OPENMPI_KILLED = """
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 6918 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPENMPI_CODE = """
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-6788@1,0]
   Exit code:    75
"""


@pytest.mark.parametrize(
    ("kind", "returncode", "words", "pids", "expected"),
    [
        (None, 0, "", {}, {}),
        (None, -9, "", {}, {0: -9}),
        (None, 75, "", {}, {0: 75}),
        ("mpich", 0, "[mpiexec@vm] Exit codes: [vm] 0,0\n", {}, {}),
        ("mpich", 75, "[mpiexec@vm] Exit codes: [vm] 19200,256\n", {}, {0: 75, 1: 1}),
        ("mpich", 9, HYDRA_KILLED.format(codes="0,9"), {}, {1: -9}),
        ("mpich", 9, HYDRA_KILLED.format(codes="9,9"), {6735: 0, 6736: 1}, {1: -9}),
        ("mpich", 9, HYDRA_KILLED.format(codes="9,9"), {}, {0: -9, 1: -9}),
        ("mpich", 9, HYDRA_KILLED.format(codes="9,256"), {6736: 0}, {0: -9, 1: 1}),
        ("mpich", 15, HYDRA_KILLED.format(codes="15,9"), {}, {0: -15}),
        ("mpich", 11, HYDRA_KILLED.format(codes="9,768"), {}, {1: 3}),
        ("mpich", 7, "Abort(7) on node 1 (rank 1 in comm 0)", {}, {}),
        ("openmpi", 137, OPENMPI_KILLED, {}, {1: -9}),
        ("openmpi", 75, OPENMPI_CODE, {}, {0: 75}),
    ],
)
def test_statuses(kind, returncode, words, pids, expected) -> None:
    assert statuses(kind, returncode, words, pids) == expected


def test_the_order_in_which_ranks_ended_counts_more_than_what_hydra_names() -> None:
    """Hydra names whichever of its dead children the kernel lists first."""
    words, pids = HYDRA_KILLED.format(codes="9,0,9"), {6736: 0, 6737: 1, 6738: 2}
    assert statuses("mpich", 9, words, pids, [1, 2, 0]) == {2: -9}


def test_a_rank_that_no_poll_has_seen_is_known_by_its_events(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for rank, process in enumerate((os.getpid(), dead.pid)):
        EventLog(run.events(rank), rank, 3).write("attempt_start", pid=process)
    words = HYDRA_KILLED.format(codes="9,9").replace("6736", str(dead.pid))
    attempt = Attempt(RankCommand(run, 3, ["sh", "-c", f"echo '{words}'; exit 9"], os.environ), 2, "mpich")
    while (returncode := attempt.poll()) is None:
        time.sleep(0.01)
    assert not attempt.ranks
    assert attempt.gone() == [1]
    assert attempt.statuses(returncode) == {1: -9}


def test_a_rank_whose_log_is_still_open_did_not_end_first(tmp_path: Path) -> None:
    """mpirun may be gone while the kernel still takes down a rank that Hydra has killed, and that Hydra names."""
    run = RunDir(tmp_path)
    words = HYDRA_KILLED.format(codes="9,9").replace("6736", str(os.getpid()))
    EventLog(run.events(0), 0, 3).write("attempt_start", pid=os.getpid())
    attempt = Attempt(RankCommand(run, 3, ["sh", "-c", f"echo '{words}'; exit 9"], os.environ), 2, "mpich")
    while (returncode := attempt.poll()) is None:
        time.sleep(0.01)
    assert attempt.statuses(returncode) == {0: -9}, "without logs, only Hydra's word counts"
    run.log(3, 1).write_text("")
    assert attempt.statuses(returncode) == {0: -9}, "rank 0 may have ended before it had a log"
    with run.log(3, 0).open("w"):
        assert attempt.statuses(returncode) == {1: -9}
    assert attempt.statuses(returncode) == {1: -9}
    attempt.kill()


def test_ranks_that_are_gone_are_in_the_order_of_their_ends(tmp_path: Path) -> None:
    run, dead = RunDir(tmp_path), []
    for rank in range(3):
        dead.append(subprocess.Popen(["true"]))
        dead[rank].wait()
        EventLog(run.events(rank), rank, 0).write("attempt_start", pid=dead[rank].pid)
    attempt = Attempt(RankCommand(run, 0, ["true"], os.environ), 3, "mpich")
    for rank in (2, 1):
        run.log(0, rank).write_text("")
    assert attempt.gone() == [0, 2, 1], "one without a log ended as it started"
    attempt.kill()


FAILED = {1: {"reason": "disk on fire", "exit_code": 1, "time": 5.0}}
LOST = {"reason": "MPI_Recv failed", "exit_code": 1, "time": 4.0, "communication": True}
WRONG = {0: {"reason": "no such file", "exit_code": 2, "time": 5.0}}


@pytest.mark.parametrize(
    ("returncode", "ended", "failures", "outcome", "sentence", "rank"),
    [
        (0, {}, {}, Outcome.FINISHED, "finished", None),
        (75, {0: 75, 1: 75}, {}, Outcome.PREEMPTED, "saved and stopped", None),
        (75, {}, {}, Outcome.PREEMPTED, "saved and stopped", None),
        (9, {1: -9}, {}, Outcome.FAILURE, "rank 1 was killed by SIGKILL", 1),
        (9, {0: -9, 1: -9}, {}, Outcome.FAILURE, "ranks 0, 1 were killed by SIGKILL", None),
        (11, {0: -11}, {}, Outcome.FAILURE, "rank 0 was killed by SIGSEGV", 0),
        (15, {1: -15}, {}, Outcome.PREEMPTED, "rank 1 was ended by SIGTERM", 1),
        (79, {0: 75, 1: -15}, {}, Outcome.PREEMPTED, "rank 1 was ended by SIGTERM", 1),
        (75, {0: 75, 1: 1}, {}, Outcome.FAILURE, "rank 1 ended with exit code 1", 1),
        (3, {0: 2, 1: 1}, {}, Outcome.FAILURE, "rank 1 ended with exit code 1", 1),
        (2, {0: 2, 1: 2}, {}, Outcome.USER_ERROR, "rank 0 ended with exit code 2", 0),
        (1, {}, FAILED, Outcome.FAILURE, "disk on fire", 1),
        (0, {}, FAILED, Outcome.FAILURE, "disk on fire", 1),
        (75, {0: 75}, FAILED, Outcome.FAILURE, "disk on fire", 1),
        (2, {}, WRONG, Outcome.USER_ERROR, "no such file", 0),
        (9, {1: -9}, WRONG, Outcome.FAILURE, "rank 1 was killed by SIGKILL", 1),
        (1, {}, {**FAILED, 0: {"reason": "later", "exit_code": 1, "time": 6.0}}, Outcome.FAILURE, "disk on fire", 1),
        (1, {}, {0: LOST, **FAILED}, Outcome.FAILURE, "disk on fire", 1),
        (1, {}, {0: LOST}, Outcome.FAILURE, "MPI_Recv failed", 0),
        (9, {1: -9}, {0: LOST}, Outcome.FAILURE, "rank 1 was killed by SIGKILL", 1),
        # The node of the rank that was given wrong input is two hours ahead.
        (1, {}, {1: {**WRONG[0], "time": 7200.0}, 0: FAILED[1]}, Outcome.USER_ERROR, "no such file", 1),
        (1, {0: -1}, {}, Outcome.PREEMPTED, "rank 0 was ended by SIGHUP", 0),
        (1, {0: 2}, {0: {"reason": "no such key"}}, Outcome.USER_ERROR, "no such key", 0),
        (2, {}, {0: {"reason": "no such key"}}, Outcome.USER_ERROR, "no such key", 0),
        (3, {0: 0, 1: 3}, {}, Outcome.FAILURE, "rank 1 ended with exit code 3", 1),
        (-1, {}, {}, Outcome.FAILURE, "mpirun was killed by SIGHUP", None),
        (0, {}, {0: {"exit_code": 75}}, Outcome.FAILURE, "the ranks ended with exit code 0", None),
        (-9, {}, {}, Outcome.FAILURE, "mpirun was killed by SIGKILL", None),
        (255, {}, {}, Outcome.FAILURE, "the ranks ended with exit code 255", None),
        (2, {}, {}, Outcome.USER_ERROR, "the ranks ended with exit code 2", None),
    ],
)
def test_cause(returncode, ended, failures, outcome, sentence, rank) -> None:
    found = cause(returncode, ended, failures)
    assert (found.outcome, found.sentence, found.rank) == (outcome, sentence, rank)


def test_a_cause_says_with_which_code_and_whether_the_rank_recorded_it() -> None:
    recorded, observed = cause(1, {}, FAILED), cause(9, {0: -9, 1: -11}, {})
    assert (recorded.exit_code, recorded.reported) == (1, True)
    assert (observed.exit_code, observed.reported) == (-9, False)
    assert (cause(75, {0: 75}, {}).exit_code, cause(15, {1: -15}, {}).exit_code) == (75, 75)


def test_signals_have_their_names_where_they_have_one() -> None:
    assert [signal_name(number) for number in (9, 15, 40)] == ["SIGKILL", "SIGTERM", "signal 40"]


def test_out_of_memory_explains_only_a_kill() -> None:
    assert mentions(cause(9, {1: -9}, {}, out_of_memory=True).sentence, "rank 1", "SIGKILL", "out of memory")
    assert "memory" not in cause(11, {1: -11}, {}, out_of_memory=True).sentence


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ({0: "finished", 1: "finished"}, Outcome.FINISHED),
        ({0: "preempted", 1: "preempted"}, Outcome.PREEMPTED),
        ({0: "finished", 1: "preempted"}, None),
        ({0: "finished"}, None),
        ({}, None),
    ],
)
def test_an_end_stands_where_every_rank_has_the_same_on_record(ends: dict[int, str], outcome: Outcome | None) -> None:
    found = agreed(ends, 2)
    assert (found and found.outcome) == outcome
