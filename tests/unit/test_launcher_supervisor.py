"""The supervisor under a fake clock: when it starts, asks, waits, kills and gives up. Minutes in milliseconds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt, write_step
from fake_clock import FakeClock
from full_disks import mounted
from signal_handlers import restored

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.attempts.exclusion import excluded
from ortflow.launchers.budget import MOST_WITHOUT_STEP
from ortflow.launchers.records import Outcome
from ortflow.launchers.stop import GROWTH, Stop, read_request, write_request
from ortflow.launchers.supervision.supervised import AttemptNodes, Job, grace_of
from ortflow.launchers.supervision.supervisor import Supervisor, _grew
from ortflow.launchers.supervision.watch import PATIENCE, PATIENCE_REPORTED, TICK
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.run.rundir import RunDir, append_json_line
from ortflow.workflow.spec.checkpoint import CheckpointSection
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.spec.restart import Backoff, Restart
from ortflow.workflow.spec.run import ProgramRunSpec, RunSpec
from ortflow.workflow.system.disk_space import OutOfDisk

PERIODS = 2 * TICK
"""Seconds by which a supervisor that looks every TICK may be late."""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with restored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


class Lines:
    """A view that keeps what was said, and the stop request at that time."""

    def __init__(self, run: RunDir) -> None:
        self.said: list[str] = []
        self.requests: dict[str, str | None] = {}
        self._run = run

    def record(self, record: Mapping[str, Any]) -> None: ...
    def attempt(self, number: int) -> None: ...
    def tick(self) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)
        request = read_request(self._run.stop_request)
        self.requests[text.partition(":")[0]] = None if request is None else request.get("reason")


class Bench:
    """A run of two ranks whose attempts follow `attempts`."""

    def __init__(self, root: Path, *attempts: dict[str, Any], **restart: Any) -> None:
        self.run, self.clock, self.view = RunDir(root), FakeClock(), Lines(RunDir(root))
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
    assert bench.view.requests["time limit"] == "time limit", "the ranks read why"


def test_a_cancel_stays_as_its_sender_wrote_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"leaves_after": 4.0})
    written: list[bytes] = []

    def cancel() -> None:
        write_request(bench.run.stop_request, "cancel")
        written.append(bench.run.stop_request.read_bytes())

    bench.clock.after(60.0, cancel)
    bench.clock.after(62.0, lambda: written.append(bench.run.stop_request.read_bytes()))
    assert bench.supervise() == EXIT_PREEMPTED
    assert written[0] == written[1]


def test_files_are_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gone` may read the events of a thousand ranks."""
    bench, searches = Bench(tmp_path, {"seconds": 60.0}), list[float]()
    gone = FakeAttempt.gone
    monkeypatch.setattr(FakeAttempt, "gone", lambda self: (searches.append(self.clock.now), gone(self))[1])
    assert bench.supervise() == EXIT_DONE
    assert 50 <= len(searches) <= 62


def test_ranks_that_do_not_leave_in_their_grace_are_killed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON)
    bench.clock.after(60.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    (attempt,) = bench.started
    assert attempt.asked_at is not None
    assert attempt.killed_at is not None
    assert attempt.killed_at - attempt.asked_at == pytest.approx(30.0, abs=PERIODS)
    assert "did not leave within 30 s" in bench.ends()[0]["cause"]


@pytest.mark.parametrize(("own", "seconds"), [(1.0, 30.0), (19.0, 30.0), (21.0, 31.0), (60.0, 70.0)])
def test_a_program_has_its_own_time_to_stop_and_its_rank_ten_seconds_more(own: float, seconds: float) -> None:
    program = ProgramRunSpec(name="run", program=ProgramSection(script="train.py", stop_seconds=own))
    assert grace_of(program) == seconds
    assert grace_of(program, 65.0) == max(65.0, seconds)
    assert grace_of(RunSpec.model_construct(program=None), 65.0) == 65.0


def test_a_start_waits_for_space_as_long_as_a_save(tmp_path: Path) -> None:
    bench = Bench(tmp_path, RUNS_ON)
    job = Job(bench.run, 2, bench.restart, bench.start, lambda: None)
    assert job.room_seconds == CheckpointSection().wait_for_room


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


def test_wrong_input_is_shown_unless_the_rank_has_recorded_it(tmp_path: Path) -> None:
    observed, recorded = (Bench(tmp_path / name, {"code": 2, "seconds": 10.0}) for name in ("observed", "recorded"))
    failure = {"event": "failure", "time": 1.0, "attempt": 0, "rank": 0, "reason": "no such key", "exit_code": 2}
    append_json_line(recorded.run.events(0), failure)
    assert (observed.supervise(), recorded.supervise()) == (2, 2)
    assert [text for text in observed.view.said if "exit code 2" in text]
    assert recorded.view.said == []
    assert recorded.ends()[0]["cause"] == "no such key"


def test_a_run_that_ends_well_says_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 1.0})
    assert bench.supervise() == EXIT_DONE
    assert bench.view.said == []
    assert bench.ends()[0]["step"] == 0
    assert "counts" not in bench.ends()[0]


def test_the_log_of_a_rank_is_shown_before_that_of_mpirun(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=0)
    bench.run.log(0, 0).parent.mkdir(parents=True)
    for path, text in ((bench.run.log(0, 0), "of rank 0"), (bench.run.launcher_log(0), "of mpirun")):
        path.write_text(f"{text}\n")
    assert bench.supervise() == EXIT_FAILURE
    assert "of rank 0" in bench.view.said[0]
    assert "of mpirun" not in bench.view.said[0]


def test_a_pause_shorter_than_a_tick_is_as_long_as_it_is_said_to_be(tmp_path: Path) -> None:
    short = TICK / 8
    bench = Bench(tmp_path, {"code": 1, "seconds": 0.0}, {"seconds": 0.0}, backoff=Backoff(first=short))
    assert bench.supervise() == EXIT_DONE
    first, second = (attempt.started_at for attempt in bench.started)
    assert second - first == pytest.approx(short, abs=1e-9)


def test_the_events_of_rank_0_are_shown(tmp_path: Path) -> None:
    bench, shown = Bench(tmp_path, {"seconds": 10.0}), list[Any]()
    bench.view.record = shown.append  # type: ignore[method-assign]
    write_step(bench.run, 0, 1)
    bench.clock.after(5.0, lambda: write_step(bench.run, 0, 2))
    bench.clock.after(5.0, lambda: write_step(bench.run, 0, 3, rank=1))
    assert bench.supervise() == EXIT_DONE
    assert [record["step"] for record in shown] == [2], "those of this attempt, of this rank"


def test_lost_attempts_without_a_step_are_given_up_and_the_reason_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 1.0})
    bench.job_options["hands_back"] = True
    for number in range(MOST_WITHOUT_STEP + 1):
        bench.run.record_attempt(event="start", attempt=number)
        if number < MOST_WITHOUT_STEP:
            bench.run.record_attempt(event="end", attempt=number, outcome="lost", step=0, next="restart")
    assert bench.supervise() == EXIT_FAILURE
    assert bench.started == []
    assert bench.ends()[-1]["given_up"] is True
    assert [text for text in bench.view.said if text.startswith("its launcher died; giving up: 5 attempts")]


def test_a_lost_attempt_that_is_followed_by_another_is_not_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 1.0})
    bench.run.record_attempt(event="start", attempt=0)
    assert bench.supervise() == EXIT_DONE
    assert "given_up" not in bench.ends()[0]
    assert bench.view.said == []


class ByHand(Stop):
    """A signal that does not count as a preemption."""

    def other_than_preemption(self) -> str | None:
        return "a signal by hand"


@pytest.mark.parametrize(("code", "outcome"), [(EXIT_PREEMPTED, "preempted"), (EXIT_FAILURE, "failure")])
def test_what_looks_like_a_preemption_and_is_none_counts_against_no_budget(
    tmp_path: Path, code: int, outcome: str
) -> None:
    bench = Bench(tmp_path, {"code": code, "seconds": 10.0}, {"seconds": 1.0}, preemptions=0, failures=1)
    job = Job(bench.run, 2, bench.restart, bench.start, lambda: None)
    stop = ByHand(bench.run.stop_request, clock=bench.clock)
    assert Supervisor(job, bench.view, stop, bench.clock).supervise() == EXIT_DONE
    end = bench.ends()[0]
    assert end["outcome"] == outcome
    assert end.get("counts") == (False if outcome == "preempted" else None)
    assert ("a signal by hand" in end["cause"]) is (outcome == "preempted")


@dataclass
class Growing:
    """The nodes of an elastic run: one at first; after 20 s of training a second one is there."""

    numbers: list[int]
    why: str = "a node has come"
    trained: list[float] = field(default_factory=list)

    def choose(self, view: object, stopped: object) -> AttemptNodes | None:
        number = self.numbers.pop(0)
        return AttemptNodes(number, number, f"{number} of 2 nodes", ("n1", "n2")[:number]) if number else None

    def growing(self, trained: float) -> str | None:
        self.trained.append(trained)
        return self.why if trained > 20.0 and self.numbers else None


def elastic(root: Path, *numbers: int) -> Bench:
    bench = Bench(root, {"leaves_after": 1.0}, {"seconds": 10.0}, preemptions=0)
    bench.job_options["nodes"] = Growing(list(numbers))
    bench.clock.after(1.0, lambda: append_json_line(bench.run.events(0), {**ended("phase", 0), "attempt": 0}))
    for second, step in ((5.0, 1), (15.0, 2)):
        bench.clock.after(second, lambda step=step: write_step(bench.run, 0, step))  # type: ignore[misc]
    return bench


def test_ranks_that_make_way_for_more_nodes_are_not_preempted(tmp_path: Path) -> None:
    bench = elastic(tmp_path, 1, 2)
    assert bench.supervise() == EXIT_DONE
    starts = [record for record in bench.run.read_attempts() if record["event"] == "start"]
    assert [(start["world_size"], start["nodes"], start["on"]) for start in starts] == [
        (1, 1, ["n1"]), (2, 2, ["n1", "n2"])
    ]  # fmt: skip
    grown, done = bench.ends()
    assert (grown["outcome"], grown["grows"], grown["counts"]) == ("preempted", True, False)
    assert grown["cause"].endswith("a node has come")
    assert "grows" not in done
    assert bench.view.requests["a node has come"] == GROWTH, "the ranks read why"
    assert bench.started[0].asked_at == pytest.approx(bench.begun + 25.0, abs=1.0), "20 s after the first step"
    assert read_request(bench.run.stop_request) is None


def test_a_cancel_while_ranks_make_way_stops_the_run(tmp_path: Path) -> None:
    bench = elastic(tmp_path, 1, 2)
    bench.clock.after(25.5, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    (end,) = bench.ends()
    assert (end["asked"], end["next"], end.get("grows")) == ("cancel", "stop", None)


def test_a_stop_while_nodes_are_awaited_starts_nothing(tmp_path: Path) -> None:
    bench = elastic(tmp_path, 0)
    assert bench.supervise() == EXIT_PREEMPTED
    assert bench.started == []


@pytest.mark.parametrize(
    ("before", "after", "grew"),
    [(1, 2, True), (0, 1, True), (1, 1, False), (2, 1, False), (None, 1, False), (1, None, False), (None, None, False)],
)
def test_the_kernel_killed_for_memory_if_its_count_grew(before: int | None, after: int | None, grew: bool) -> None:
    assert _grew(before, after) is grew


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "256k") as place:
        yield place


@pytest.mark.parametrize(("code", "lacking"), [(EXIT_FAILURE, True), (-signal.SIGSEGV, False)])
def test_a_failure_on_a_disk_without_room_for_its_reason_waits_for_space(
    small_disk: Path, code: int, lacking: bool
) -> None:
    """The rank could not record why it failed. One that a signal killed had no need to write."""
    bench, filler = Bench(small_disk / "run", {"code": code, "seconds": 10.0}, {"seconds": 1.0}), small_disk / "filler"
    bench.clock.after(9.0, lambda: filler.write_bytes(bytes(192 << 10)))
    bench.clock.after(100.0, filler.unlink)
    assert bench.supervise() == EXIT_DONE
    end = bench.ends()[0]
    assert end["outcome"] == "failure"
    assert ("out of disk" in end["cause"]) is lacking
    assert end.get("counts") == (False if lacking else None)
    assert (bench.started[1].started_at - bench.begun >= 100.0) is lacking


def test_a_failure_that_its_rank_recorded_is_not_put_down_to_the_disk(small_disk: Path) -> None:
    bench, filler = Bench(small_disk / "run", FAILS, {"seconds": 1.0}), small_disk / "filler"
    failure = {"event": "failure", "time": 1.0, "attempt": 0, "rank": 0, "reason": "no such key", "exit_code": 1}
    append_json_line(bench.run.events(0), failure)
    bench.clock.after(9.0, lambda: filler.write_bytes(bytes(192 << 10)))
    bench.clock.after(100.0, filler.unlink)
    assert bench.supervise() == EXIT_DONE
    assert bench.ends()[0]["cause"] == "no such key"


# ---- nodes that are excluded


def starts_on(run: RunDir, attempt: int, *nodes: str, bad: dict[str, str] | None = None) -> None:
    """Ranks start on these nodes; with `bad`, the preflight ends them."""
    for rank, node in enumerate(nodes):
        start = {"event": "attempt_start", "time": 1.0, "attempt": attempt, "rank": rank, "host": node, "pid": 1}
        append_json_line(run.events(rank), start)
    if bad is not None:
        of_rank_0 = {"time": 1.0, "attempt": attempt, "rank": 0}
        append_json_line(run.events(0), {"event": "preflight", **of_rank_0, "nodes": {}, "bad": bad})
        append_json_line(run.events(0), {"event": "failure", **of_rank_0, "reason": "preflight: slow", "exit_code": 1})


class Reserve:
    """Nodes of which three are there, as `supervised.Nodes`."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def choose(self, view: object, stopped: object) -> AttemptNodes:
        out = excluded(self.run.read_attempts())
        return AttemptNodes(2, 2, "", tuple([name for name in ("n1", "n2", "n3") if name not in out][:2]))

    def growing(self, trained: float) -> str | None:
        return None

    def lack(self, excluded: Collection[str]) -> str | None:
        return None if len(excluded) < 2 else "1 node would be left, and the run needs 2"


def test_a_slow_node_costs_no_budget_and_without_a_replacement_the_run_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=0)
    starts_on(bench.run, 0, "n1", "n2", bad={"n2": "computes at 38%"})
    starts_on(bench.run, 1, "n1", "n3", bad={"n3": "computes at 31%"})
    bench.job_options = {"nodes": Reserve(bench.run)}
    assert bench.supervise() == EXIT_FAILURE
    first, second = bench.ends()
    assert (first["counts"], first["next"]) == (False, "restart")
    assert first["excludes"] == {"n2": "preflight: it computes at 38%"}
    starts = [record["on"] for record in bench.run.read_attempts() if record["event"] == "start"]
    assert starts == [["n1", "n2"], ["n1", "n3"]]
    assert second["next"] == "stop"
    assert "no other node can take its place: 1 node would be left" in second["why"]


def test_a_run_with_its_nodes_for_good_ends_when_one_is_slow(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=9)
    starts_on(bench.run, 0, "n1", "n2", bad={"n2": "computes at 38%"})
    assert bench.supervise() == EXIT_FAILURE
    assert len(bench.started) == 1
    assert "resources.spares" in bench.ends()[0]["why"]


def test_a_node_on_which_ranks_die_twice_is_excluded(tmp_path: Path) -> None:
    killed = Cause(Outcome.FAILURE, -9, "rank 1 was killed by SIGKILL", 1)
    dies = {"code": -9, "seconds": 10.0, "reported": killed}
    bench = Bench(tmp_path, dies, dies, {"seconds": 10.0}, failures=2)
    for attempt in range(2):
        starts_on(bench.run, attempt, "n1", "n2")
    bench.job_options = {"nodes": Reserve(bench.run)}
    assert bench.supervise() == EXIT_DONE
    first, second, _ = bench.ends()
    assert first["blamed"] == ["n2"]
    assert "excludes" not in first
    assert list(second["excludes"]) == ["n2"]
    assert [start["on"][1] for start in bench.run.read_attempts() if start["event"] == "start"] == ["n2", "n2", "n3"]
    assert any("n2 takes part in no further attempt" in said for said in bench.view.said)


@pytest.mark.parametrize("others", [True, False])
def test_a_node_stays_if_the_scheduler_has_no_other(others: bool, tmp_path: Path) -> None:
    killed = Cause(Outcome.FAILURE, -9, "rank 1 was killed by SIGKILL", 1)
    dies = {"code": -9, "seconds": 10.0, "reported": killed}
    bench = Bench(tmp_path, dies, dies, {"seconds": 10.0}, failures=2)
    for attempt in range(2):
        starts_on(bench.run, attempt, "n1", "n2")
    asked: list[set[str]] = []
    bench.job_options = {"hands_back": True, "has_other_nodes": lambda out: asked.append(set(out)) or others}
    assert bench.supervise() == (EXIT_PREEMPTED if others else EXIT_DONE)
    assert asked == [{"n2"}]
    assert list(bench.ends()[1].get("excludes", ())) == (["n2"] if others else [])
    assert any("and stays: the scheduler has no others" in said for said in bench.view.said) is not others


def test_a_scheduler_gives_another_node(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=0)
    starts_on(bench.run, 0, "n1", "n2", bad={"n2": "computes at 38%"})
    bench.job_options = {"hands_back": True}
    assert bench.supervise() == EXIT_PREEMPTED
    assert bench.ends()[-1]["next"] == "restart"
    assert len(bench.started) == 1


def test_a_preflight_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FAILS, failures=0)
    for attempt in range(MOST_WITHOUT_STEP + 5):
        starts_on(bench.run, attempt, "n1", "n2", bad={f"n{attempt}": "computes at 38%"})
    bench.job_options = {"nodes": Reserve(bench.run)}
    bench.job_options["nodes"].lack = lambda out: None
    assert bench.supervise() == EXIT_FAILURE
    assert len(bench.started) <= MOST_WITHOUT_STEP + 1
