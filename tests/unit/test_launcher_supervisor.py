"""The supervisor under a fake clock: when it starts, asks, waits, kills and gives up. Minutes in milliseconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt, write_step
from fake_clock import FakeClock
from signal_handlers import restored

from ortflow.launchers.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.launchers.stop import Stop, write_request
from ortflow.launchers.supervised import GRACE, Job
from ortflow.launchers.supervisor import Supervisor
from ortflow.launchers.watch import PATIENCE, PATIENCE_REPORTED, TICK
from ortflow.workflow.disk_space import OutOfDisk
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.rundir import RunDir, append_json_line
from ortflow.workflow.spec.run import Backoff, Restart

PERIODS = 2 * TICK
"""Seconds by which a supervisor that looks every TICK may be late."""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with restored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


class Lines:
    """A view that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, record: Mapping[str, Any]) -> None: ...
    def attempt(self, number: int) -> None: ...
    def tick(self) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)


class Bench:
    """A run of two ranks whose attempts follow `attempts`."""

    def __init__(self, root: Path, *attempts: dict[str, Any], **restart: Any) -> None:
        self.run, self.clock, self.view = RunDir(root), FakeClock(), Lines()
        self.restart = Restart(**{"backoff": Backoff(first=0.0), "hung_seconds": None, **restart})
        self.begun = self.clock.now
        self.planned, self.started = list(attempts), list[FakeAttempt]()
        self.job_options: dict[str, Any] = {}
        self.stop_options: dict[str, Any] = {}

    def start(self, number: int) -> FakeAttempt:
        planned = self.planned[min(number, len(self.planned) - 1)]
        self.started.append(FakeAttempt(self.clock, number, **planned))
        return self.started[-1]

    def supervise(self) -> int:
        job = Job(self.run, 2, self.restart, self.start, lambda: None, **self.job_options)
        stop = Stop(self.run.stop_request, clock=self.clock, **self.stop_options)
        return Supervisor(job, self.view, stop, self.clock).supervise()

    def ends(self) -> list[dict[str, Any]]:
        return [record for record in self.run.read_attempts() if record["event"] in ("end", "stop")]


FAILS = {"code": EXIT_FAILURE, "seconds": 10.0}
RUNS_ON: dict[str, Any] = {}


def test_a_run_that_ends_is_noticed_within_a_tick(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 60.0})
    assert bench.supervise() == EXIT_DONE
    assert bench.clock.now - bench.begun == pytest.approx(60.0, abs=PERIODS)
    assert [end["outcome"] for end in bench.ends()] == ["finished"]


@pytest.mark.parametrize("reported", [True, False])
def test_a_report_of_a_worker_overrides_a_guess(tmp_path: Path, reported: bool) -> None:
    memory = Cause(Outcome.FAILURE, EXIT_FAILURE, "the worker w-0 ran out of memory")
    killed = Cause(Outcome.FAILURE, -9, "a rank on w-0 was killed by SIGKILL")
    bench = Bench(tmp_path, {**FAILS, "reported": memory if reported else None, "guessed": killed}, failures=0)
    assert bench.supervise() == EXIT_FAILURE
    assert bench.ends()[0]["cause"] == (memory if reported else killed).sentence


def test_the_pause_doubles_up_to_its_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=5, backoff=Backoff(first=10.0, limit=60.0))
    assert bench.supervise() == EXIT_FAILURE
    starts = [one.started_at for one in bench.started]
    pauses = [after - before - 10.0 for before, after in pairwise(starts)]
    assert pauses == pytest.approx([10.0, 20.0, 40.0, 60.0, 60.0], abs=PERIODS)
    assert [end["next"] for end in bench.ends()] == ["restart"] * 5 + ["stop"]


def test_a_request_in_the_pause_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, backoff=Backoff(first=3600.0, limit=3600.0))
    bench.clock.after(100.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    assert len(bench.started) == 1
    assert bench.clock.now - bench.begun == pytest.approx(100.0, abs=1.0)
    assert bench.ends()[-1]["asked"] == "cancel"


def test_the_time_limit_asks_ranks_to_leave(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"leaves_after": 4.0})
    bench.stop_options["limit"] = 120.0
    assert bench.supervise() == EXIT_PREEMPTED
    (attempt,) = bench.started
    assert attempt.asked_at == pytest.approx(bench.begun + 120.0, abs=PERIODS)
    assert bench.clock.now - bench.begun == pytest.approx(124.0, abs=2 * PERIODS)
    (end,) = bench.ends()
    assert (end["outcome"], end["asked"], end["next"]) == ("preempted", "time limit", "stop")


def test_ranks_that_do_not_leave_in_their_grace_are_killed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON)
    bench.clock.after(60.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    (attempt,) = bench.started
    assert attempt.asked_at is not None
    assert attempt.killed_at is not None
    assert attempt.killed_at - attempt.asked_at == pytest.approx(GRACE, abs=PERIODS)
    assert f"did not leave within {GRACE:g} s" in bench.ends()[0]["cause"]


def test_cancel_now_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON)
    bench.clock.after(60.0, lambda: write_request(bench.run.stop_request, "cancel", now=True))
    assert bench.supervise() == EXIT_PREEMPTED
    (attempt,) = bench.started
    assert attempt.killed_at == pytest.approx(bench.begun + 60.0, abs=1.0)


def test_a_preemption_is_followed_by_another_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"code": EXIT_PREEMPTED, "seconds": 10.0}, {"seconds": 10.0}, preemptions=1)
    assert bench.supervise() == EXIT_DONE
    assert [end["outcome"] for end in bench.ends()] == ["preempted", "finished"]


def test_a_scheduler_that_starts_the_run_again_gets_it_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"code": EXIT_PREEMPTED, "seconds": 10.0})
    bench.job_options["hands_back"] = True
    assert bench.supervise() == EXIT_PREEMPTED
    assert len(bench.started) == 1
    assert bench.ends()[0]["next"] == "restart"


def test_ranks_without_a_sign_of_life_are_hung(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON, failures=0, hung_seconds=60.0)
    for second in range(0, 120, 20):
        bench.clock.after(second, lambda step=second: write_step(bench.run, 0, step))  # type: ignore[misc]
    assert bench.supervise() == EXIT_FAILURE
    (attempt,) = bench.started
    assert attempt.killed_at == pytest.approx(bench.begun + 100.0 + 60.0, abs=2.0), "its last step, and the limit"
    assert "60 s" in bench.ends()[0]["cause"]


def test_the_second_rank_is_a_sign_of_life_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 150.0}, hung_seconds=30.0)
    for second in range(0, 150, 15):
        bench.clock.after(second, lambda step=second: write_step(bench.run, 0, step, rank=1))  # type: ignore[misc]
    assert bench.supervise() == EXIT_DONE


@pytest.mark.parametrize("reported", [False, True])
def test_a_dead_rank_that_mpirun_does_not_notice(tmp_path: Path, reported: bool) -> None:
    bench = Bench(tmp_path, {"dead": {1: 100.0}}, failures=0)
    failure = {"event": "failure", "time": 1.0, "attempt": 0, "rank": 1, "reason": "no such key", "exit_code": 1}
    if reported:
        bench.clock.after(100.0, lambda: append_json_line(bench.run.events(1), failure))
    assert bench.supervise() == EXIT_FAILURE
    (attempt,) = bench.started
    patience = PATIENCE_REPORTED if reported else PATIENCE
    assert attempt.killed_at is not None
    late = attempt.killed_at - bench.begun - 100.0 - patience
    assert 0.0 < late < 2.0 + PERIODS, "it polls every second"
    (end,) = bench.ends()
    assert end["rank"] == 1
    assert ("no such key" in end["cause"]) is reported


def test_the_first_of_two_dead_ranks_is_the_cause(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"dead": {1: 100.0, 0: 100.5}}, failures=0)
    assert bench.supervise() == EXIT_FAILURE
    (end,) = bench.ends()
    assert (end["rank"], end["cause"]) == (1, "rank 1 died and mpirun did not notice")


def test_a_dead_rank_is_the_cause_of_the_failed_call_of_another(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"dead": {1: 100.0}}, failures=0)
    failure = {"event": "failure", "time": 1.0, "attempt": 0, "rank": 0, "reason": "MPI_Recv failed", "exit_code": 1}
    failed = {**failure, "communication": True}
    bench.clock.after(100.5, lambda: append_json_line(bench.run.events(0), failed))
    assert bench.supervise() == EXIT_FAILURE
    assert (bench.started[0].killed_at or 0.0) - bench.begun > 100.0 + PATIENCE, "mpirun may still notice"
    (end,) = bench.ends()
    assert end["rank"] == 1
    assert "MPI_Recv" not in end["cause"]


def test_a_start_without_disk_space_waits_as_long_as_configured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON)
    bench.job_options["room_seconds"] = 60.0

    def no_room(number: int) -> FakeAttempt:
        raise OutOfDisk(tmp_path, 1 << 60)

    bench.start = no_room  # type: ignore[method-assign]
    with pytest.raises(OutOfDisk):
        bench.supervise()
    assert bench.clock.now - bench.begun == pytest.approx(60.0, abs=1.0)
    assert [text for text in bench.view.said if "60 s" in text]


def test_a_start_continues_when_there_is_disk_space(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 10.0})
    start, full = bench.start, [True]

    def first_no_room(number: int) -> FakeAttempt:
        if full:
            full.clear()
            raise OutOfDisk(tmp_path, 1)
        return start(number)

    bench.start = first_no_room  # type: ignore[method-assign]
    assert bench.supervise() == EXIT_DONE


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_killed_because_another_one_failed_on_a_full_disk(tmp_path: Path, failed: bool) -> None:
    """Nothing of it could be recorded, and the disk has space again. A rank that only waited for space says nothing."""
    bench = Bench(tmp_path, {"code": -signal.SIGKILL, "seconds": 10.0}, {"seconds": 10.0})
    lack = OutOfDisk(tmp_path, 1)
    notice = json.dumps({"path": str(tmp_path), "needed": 1, "short": True, "fatal": failed})
    bench.clock.after(9.0, lambda: bench.run.heartbeat.write_text(notice))
    assert bench.supervise() == EXIT_DONE
    end = bench.ends()[0]
    assert (end["outcome"], end["cause"] == str(lack)) == ("failure", failed)
    assert end["why"] == ("that counts against no budget" if failed else "failure 1 of 3")


KILLED = {"code": 9, "seconds": 10.0}


def ended(event: str, rank: int) -> dict[str, Any]:
    return {"event": event, "time": 1.0, "attempt": 0, "rank": rank, "step": 9, "saved": True}


@pytest.mark.parametrize(
    ("events", "outcome", "status"),
    [
        (("finished", "finished"), "finished", EXIT_DONE),
        (("preempted", "preempted"), "preempted", EXIT_FAILURE),
        (("finished", "preempted"), "failure", EXIT_FAILURE),
        (("finished",), "failure", EXIT_FAILURE),
    ],
)
def test_the_ends_that_every_rank_has_recorded_count_more_than_mpiruns_status(
    tmp_path: Path, events: tuple[str, ...], outcome: str, status: int
) -> None:
    """Hydra has named ranks as killed by SIGKILL that were leaving MPI with the others."""
    bench = Bench(tmp_path, KILLED, {"code": 1, "seconds": 1.0}, failures=0)
    for rank, event in enumerate(events):
        append_json_line(bench.run.events(rank), ended(event, rank))
    found = bench.supervise()
    assert bench.ends()[0]["outcome"] == outcome
    assert found == status


@pytest.mark.parametrize(("begun", "outcome"), [(1, "preempted"), (2, "failure")])
def test_a_signal_before_all_ranks_have_started_is_no_failure(tmp_path: Path, begun: int, outcome: str) -> None:
    """It kills a rank that has no handler yet, and the others with it."""
    bench = Bench(tmp_path, {"code": 15, "seconds": 10.0})
    for rank in range(begun):
        write_step(bench.run, 0, 0, rank)
    bench.clock.after(9.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert bench.supervise() == (EXIT_PREEMPTED if outcome == "preempted" else EXIT_FAILURE)
    (end,) = bench.ends()
    assert (end["outcome"], end["asked"], end["next"]) == (outcome, "SIGTERM", "stop")
    assert end["why"] == "requested by SIGTERM"


def test_a_signal_of_a_sender_that_starts_the_run_again_does_not_stop_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"leaves_after": 4.0})
    bench.job_options["comes_back"] = True
    bench.clock.after(60.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert bench.supervise() == EXIT_PREEMPTED
    (end,) = bench.ends()
    assert (end["outcome"], end["asked"], end["next"]) == ("preempted", "SIGTERM", "restart")


def test_such_a_signal_in_a_pause_records_no_stop(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, backoff=Backoff(first=3600.0, limit=3600.0))
    bench.job_options["comes_back"] = True
    bench.clock.after(100.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert bench.supervise() == EXIT_PREEMPTED
    assert [end["event"] for end in bench.ends()] == ["end"]


def test_a_stop_in_a_pause_is_recorded_with_its_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, backoff=Backoff(first=3600.0, limit=3600.0))
    bench.clock.after(100.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert bench.supervise() == EXIT_PREEMPTED
    stop = bench.ends()[-1]
    assert (stop["event"], stop["outcome"], stop["asked"]) == ("stop", "preempted", "interrupt")


def test_a_preemption_beyond_the_budget_gives_up_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"code": EXIT_PREEMPTED, "seconds": 10.0}, preemptions=1)
    assert bench.supervise() == EXIT_PREEMPTED
    first, last = bench.ends()
    assert (first["next"], first.get("given_up"), last["next"], last["given_up"]) == ("restart", None, "stop", True)
    said = "\n".join(bench.view.said)
    assert "saved and stopped; restarting (preemption 1)" in said
    assert "saved and stopped; giving up: the budget of 1 preemption is spent" in said


def test_wrong_input_is_not_tried_again_and_has_its_own_status(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"code": 2, "seconds": 10.0})
    assert bench.supervise() == 2
    (end,) = bench.ends()
    assert (end["outcome"], end["exit_code"], end["next"]) == ("user_error", 2, "stop")


def test_a_failure_is_recorded_and_shown_with_the_end_of_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, {"seconds": 1.0}, backoff=Backoff(first=5.0))
    for step in (3, 7):
        write_step(bench.run, 0, step)
    bench.run.launcher_log(0).parent.mkdir(parents=True)
    bench.run.launcher_log(0).write_text("".join(f"line {number}\n" for number in range(20)))
    assert bench.supervise() == EXIT_DONE
    failed, done = bench.ends()
    assert failed["step"] == 7
    assert (failed["exit_code"], failed["rank"], failed["pause"]) == (1, None, 5.0)
    assert failed["why"] == "failure 1 of 3"
    assert (done["outcome"], done["next"], done["exit_code"]) == ("finished", "stop", 0)
    said = "\n".join(bench.view.said)
    assert "line 8\n  line 9" in said
    assert said.index("line 19") < said.index("restarting in 5 s (failure 1 of 3)")
    assert "line 7" not in said, "the last twelve lines"
    assert "; restarting" not in said, "the failure is not said twice"


def test_an_attempt_whose_launcher_died_is_closed_before_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 1.0})
    bench.run.record_attempt(event="start", attempt=0)
    write_step(bench.run, 0, 4)
    assert bench.supervise() == EXIT_DONE
    lost, done = bench.ends()
    assert (lost["attempt"], lost["outcome"], lost["step"], lost["next"]) == (0, "lost", 4, "restart")
    assert lost["cause"] == "its launcher died"
    assert (done["attempt"], bench.started[0].number) == (1, 1)


def test_a_stop_request_is_gone_when_it_has_been_carried_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"leaves_after": 1.0})
    bench.clock.after(60.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    assert not bench.run.stop_request.exists()
    assert bench.started[0].killed_at is not None, "nothing of an attempt outlives it"
