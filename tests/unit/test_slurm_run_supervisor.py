"""The batch step of a Slurm job under a fake clock: how long it retries, when it exits, and when it stays."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt
from fake_clock import FakeClock
from messages import mentions
from signal_handlers import restored

from ortflow.launchers.batch.current_job import PAUSE, Answer, Fate, requeue
from ortflow.launchers.batch.job_supervisor import AWAY, CANCELLING, RunSupervisor
from ortflow.launchers.batch.stopping import SETTLED, SIGNALS, JobStop
from ortflow.launchers.records import State
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.current_job import SlurmJob
from ortflow.launchers.slurm.jobs import SEPARATOR
from ortflow.launchers.slurm.runner import Answer as Reply
from ortflow.launchers.slurm.runner import Settings
from ortflow.launchers.status import read_status
from ortflow.launchers.stop import write_request
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.run import TrainerRunSpec

RUN = """\
name: gpt
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
restart: {backoff: {first: 1}}
"""
AHEAD = 90.0
AWAY_WORDS = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class FakeController:
    """What slurmctld answers to the commands of a batch step."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.state, self.restarts, self.preempted = "RUNNING", 0, "None"
        self.ends: float | None = None
        """When the time limit ends the job, by the clock."""
        self.away_until = 0.0
        self.refuses = False
        self.shows_after = 0.0
        """Seconds after a requeue until a query shows it."""
        self.takes = False
        """Whether sbatch accepts a job from inside this one."""
        self.missing: set[str] = set()
        """Commands that are not installed on the job's node."""
        self.calls: list[tuple[str, ...]] = []

    @property
    def job(self) -> SlurmJob:
        """The job, as its batch step sees it."""
        return SlurmJob("7", 0, "node1", Slurm(self, self.clock))

    def __call__(self, command: Sequence[str], settings: Settings, seconds: float) -> Reply:
        self.calls.append(tuple(command))
        if command[0] in self.missing:
            raise FileNotFoundError(command[0])
        code, words = self._reply(tuple(command))
        return Reply(code, "" if code else words, words if code else "")

    def _reply(self, command: tuple[str, ...]) -> tuple[int, str]:
        if self.clock.now < self.away_until:
            return 1, AWAY_WORDS
        if command[:2] == ("scontrol", "requeue"):
            if self.refuses:
                return 1, "Requested operation is presently disabled"
            self.clock.after(self.shows_after, self._queue)
            return 0, ""
        if command[0] == "scontrol":
            output = f"JobState={self.state} Reason=None Restarts={self.restarts} PreemptTime={self.preempted}"
            return 0, f"JobId=7 {output}"
        if command[0] == "squeue" and command[-1].startswith("--Format="):
            values = (
                "7",
                "7",
                self.state,
                "None",
                "N/A",
                "N/A",
                "10:00",
                "node1",
                self.restarts,
                0,
                "a",
                *["(null)"] * 3,
            )
            return 0, "".join(f"{value}{SEPARATOR}" for value in values)
        if command[0] == "squeue":
            return 0, "UNLIMITED" if self.ends is None else _duration(self.ends - self.clock.now)
        if command[0] == "scancel":
            self.state = "CANCELLED"
        return (0, "8") if command[0] == "sbatch" and self.takes else (int(command[0] == "sbatch"), "sbatch: error: no")

    def _queue(self) -> None:
        self.state, self.restarts = "PENDING", self.restarts + 1


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def controller(clock: FakeClock) -> Iterator[FakeController]:
    """The job's controller; restores the signal handlers that a batch step replaces."""
    with restored(*SIGNALS):
        yield FakeController(clock)


class PlannedRanks:
    """Ranks whose attempts follow `planned`."""

    def __init__(self, clock: FakeClock, **planned: Any) -> None:
        self.clock, self.planned = clock, planned
        self.attempt: FakeAttempt | None = None

    def start(self, spec: TrainerRunSpec, number: int, environment: Mapping[str, str]) -> FakeAttempt:
        self.attempt = FakeAttempt(self.clock, number, **self.planned)
        return self.attempt

    def lead(self, spec: TrainerRunSpec) -> float:
        return AHEAD


def run_supervisor_of(root: Path, controller: FakeController, ranks: PlannedRanks) -> RunSupervisor:
    run = RunDir(root)
    run.run_file.write_text(RUN)
    return RunSupervisor(run, ranks, controller.job, "ortflow abc", controller.clock)


def ends(root: Path) -> list[dict[str, Any]]:
    return [record for record in RunDir(root).read_attempts() if record["event"] in ("end", "stop")]


def test_a_controller_that_is_away_is_asked_again(clock: FakeClock, controller: FakeController) -> None:
    controller.away_until = clock.now + 100.0
    assert requeue(controller.job, AWAY, clock) == (Answer.QUEUED, "")
    assert set(clock.sleeps) == {PAUSE}
    assert sum(clock.sleeps) == pytest.approx(100.0, abs=PAUSE)


def test_a_controller_that_stays_away_is_given_up(clock: FakeClock, controller: FakeController) -> None:
    controller.away_until, begun = clock.now + 2 * AWAY, clock.now
    assert requeue(controller.job, AWAY, clock)[0] is Answer.AWAY
    assert clock.now - begun == pytest.approx(AWAY, abs=PAUSE)
    assert ("scontrol", "requeue", "7") not in controller.calls, "never requested without a query"


def test_a_command_that_a_node_cannot_start_is_not_an_answer(clock: FakeClock) -> None:
    def full(command: Sequence[str], settings: Settings, seconds: float) -> Reply:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    job = SlurmJob("7", 0, "node1", Slurm(full, clock))
    assert job.fate() is Fate.UNKNOWN
    assert requeue(job, 10.0, clock)[0] is Answer.AWAY


@pytest.mark.parametrize(("shows_after", "stays"), [(0.0, 0.0), (40.0, 40.0), (2000.0, SlurmJob.stay)])
def test_a_preempted_run_stays_until_slurm_has_queued_it_again(
    tmp_path: Path, clock: FakeClock, controller: FakeController, shows_after: float, stays: float
) -> None:
    controller.preempted, controller.shows_after, begun = "2026-11-21T13:59:34", shows_after, clock.now
    assert (
        run_supervisor_of(tmp_path, controller, PlannedRanks(clock, code=EXIT_PREEMPTED, seconds=10.0)).keep()
        == EXIT_PREEMPTED
    )
    assert ("scontrol", "requeue", "7") in controller.calls
    assert clock.now - begun == pytest.approx(10.0 + stays, abs=2.0), (
        "a batch step that ends before makes the job COMPLETED"
    )
    assert [(end["next"], end.get("counts", True)) for end in ends(tmp_path)] == [("restart", True)]


def test_a_run_that_never_comes_to_a_step_is_not_queued_again(
    tmp_path: Path, clock: FakeClock, controller: FakeController
) -> None:
    controller.preempted = "2026-11-21T13:59:34"
    for number in range(5):
        RunDir(tmp_path).record_attempt(event="start", attempt=number)
        RunDir(tmp_path).record_attempt(event="end", attempt=number, outcome="preempted", step=0, next="restart")
    assert (
        run_supervisor_of(tmp_path, controller, PlannedRanks(clock, code=EXIT_PREEMPTED, seconds=10.0)).keep()
        == EXIT_FAILURE
    )
    assert ("scontrol", "requeue", "7") not in controller.calls
    reported = ends(tmp_path)[-1]
    assert reported["next"] == "stop"
    assert mentions(reported["why"], "5 attempts")
    assert read_status(RunDir(tmp_path), alive=False).state is State.FAILED


def test_a_damaged_line_is_moved_aside_and_reported(
    tmp_path: Path, clock: FakeClock, controller: FakeController, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.record_attempt(event="start", attempt=0)
    with run.attempts.open("a") as file:
        file.write('{"event": "end", "attempt": "none"}\n')
    assert (
        run_supervisor_of(tmp_path, controller, PlannedRanks(clock, code=EXIT_DONE, seconds=10.0)).keep() == EXIT_DONE
    )
    assert "moved to attempts.jsonl.damaged" in capfd.readouterr().out
    assert '"none"' not in run.attempts.read_text()
    assert '"none"' in (tmp_path / "attempts.jsonl.damaged").read_text()


def test_a_finished_run_ends_the_batch_step(tmp_path: Path, clock: FakeClock, controller: FakeController) -> None:
    begun = clock.now
    assert run_supervisor_of(tmp_path, controller, PlannedRanks(clock, seconds=10.0)).keep() == EXIT_DONE
    assert clock.now - begun == pytest.approx(10.0, abs=1.0)


def test_a_site_that_does_not_requeue(tmp_path: Path, clock: FakeClock, controller: FakeController) -> None:
    controller.refuses = True
    assert (
        run_supervisor_of(tmp_path, controller, PlannedRanks(clock, code=EXIT_PREEMPTED, seconds=10.0)).keep()
        == EXIT_FAILURE
    )
    assert "presently disabled" in ends(tmp_path)[-1]["why"]


def test_without_scontrol_another_job_follows(tmp_path: Path, clock: FakeClock, controller: FakeController) -> None:
    """Many sites install only srun and sbatch on the compute nodes: nothing waits for a command that cannot come."""
    controller.missing, controller.takes, begun = {"scontrol"}, True, clock.now
    ranks = PlannedRanks(clock, code=EXIT_PREEMPTED, seconds=10.0)
    assert run_supervisor_of(tmp_path, controller, ranks).keep() == EXIT_PREEMPTED
    assert clock.now - begun < 60.0
    newest = RunDir(tmp_path).read_attempts()[-1]
    assert (newest["event"], newest["job"], newest["follows"]) == ("submit", "8", "7")


@pytest.mark.parametrize("asked", [None, signal.SIGTERM])
def test_without_any_command_of_slurm_the_run_is_not_left_restarting(
    tmp_path: Path, clock: FakeClock, controller: FakeController, asked: signal.Signals | None
) -> None:
    """After a SIGTERM Slurm may start the job again by itself, so the run is given up only when it has not."""
    controller.missing, begun = {"scontrol", "squeue", "sbatch", "scancel"}, clock.now
    ranks = PlannedRanks(clock, leaves_after=4.0) if asked else PlannedRanks(clock, code=EXIT_PREEMPTED, seconds=10.0)
    run_supervisor = run_supervisor_of(tmp_path, controller, ranks)
    if asked is not None:
        clock.after(10.0, lambda: signal.raise_signal(asked))
    assert run_supervisor.keep() == EXIT_FAILURE
    stayed = SlurmJob.stay if asked else 0.0
    assert stayed <= clock.now - begun < stayed + 60.0
    assert mentions(ends(tmp_path)[-1]["why"], "there is no squeue", "there is no sbatch")
    assert read_status(RunDir(tmp_path), alive=True).state is State.LOST


def test_a_cancelled_run_cancels_its_job_and_stays(
    tmp_path: Path, clock: FakeClock, controller: FakeController
) -> None:
    run_supervisor = run_supervisor_of(tmp_path, controller, PlannedRanks(clock, leaves_after=4.0))
    clock.after(20.0, lambda: write_request(RunDir(tmp_path).stop_request, "cancel"))
    begun = clock.now
    assert run_supervisor.keep() == EXIT_PREEMPTED
    assert ("scancel", "7") in controller.calls
    assert clock.now - begun == pytest.approx(24.0 + CANCELLING, abs=2.0)


def test_ranks_save_ahead_of_the_time_limit(tmp_path: Path, clock: FakeClock, controller: FakeController) -> None:
    controller.ends = clock.now + 300.0
    ranks, begun = PlannedRanks(clock, leaves_after=4.0), clock.now
    assert run_supervisor_of(tmp_path, controller, ranks).keep() == EXIT_PREEMPTED
    assert ranks.attempt is not None
    assert ranks.attempt.asked_at == pytest.approx(begun + 300.0 - AHEAD, abs=2.0)
    assert ends(tmp_path)[0]["counts"] is False, "a time limit is no preemption"


def test_a_limit_that_was_raised_is_asked_for_before_ranks_leave(
    tmp_path: Path, clock: FakeClock, controller: FakeController
) -> None:
    controller.ends = clock.now + 300.0
    stop = JobStop(tmp_path / ".stop", controller.job, AHEAD, clock=clock)
    controller.ends += 600.0
    clock.sleep(300.0 - AHEAD)
    assert stop.check() is None
    clock.sleep(600.0)
    assert stop.check() == "time limit"


def test_slurm_is_queried_for_the_reason_of_a_signal(
    tmp_path: Path, clock: FakeClock, controller: FakeController
) -> None:
    stop = JobStop(tmp_path / ".stop", controller.job, AHEAD, clock=clock)
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        clock.after(0.5 * SETTLED, lambda: setattr(controller, "state", "CANCELLED"))
        assert stop.settle() == "scancel"
    assert clock.sleeps == [SETTLED]


@pytest.mark.parametrize(
    ("due", "why"),
    [("JOB REQUEUE", "a user requeued the job"), ("NODE FAILURE", "a node of the job was lost"), ("PREEMPTION", None)],
)
def test_a_requeue_is_no_preemption_although_the_controller_is_away(
    tmp_path: Path, clock: FakeClock, controller: FakeController, due: str, why: str | None
) -> None:
    output = f"slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T13:59:34 DUE TO {due} ***\n"
    stop = JobStop(tmp_path / ".stop", controller.job, AHEAD, lambda: output, clock)
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        controller.away_until = clock.now + 100.0
        assert stop.settle() == "SIGTERM"
        assert stop.other_than_preemption() == why


@pytest.mark.parametrize(("signalled", "sentence"), [(False, None), (True, "a signal was sent by hand (SIGTERM)")])
def test_a_cancelled_run_got_no_signal_by_hand(
    tmp_path: Path, clock: FakeClock, controller: FakeController, signalled: bool, sentence: str | None
) -> None:
    stop = JobStop(tmp_path / ".stop", controller.job, AHEAD, clock=clock)
    with stop.listening():
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        else:
            write_request(tmp_path / ".stop", "cancel")
        assert stop.settle() == ("SIGTERM" if signalled else "cancel")
        found = stop.other_than_preemption()
    assert (found is None) if sentence is None else mentions(str(found), sentence)


@pytest.mark.parametrize(
    ("restarts", "signalled", "expected_words"),
    [
        (0, False, "a signal was sent by hand; Slurm did not preempt"),
        (1, False, "a signal was sent to a rank, by hand or by Slurm … a step of an earlier start … did not preempt"),
        (1, True, "a signal was sent by hand (SIGTERM); Slurm did not preempt"),
    ],
)
def test_a_rank_of_a_job_that_runs_again_may_get_the_signal_for_an_earlier_step(
    tmp_path: Path,
    clock: FakeClock,
    controller: FakeController,
    restarts: int,
    signalled: bool,
    expected_words: str,
) -> None:
    """Slurm repeats it to a node that was lost, 60 s later, and the step of the next start has the same number."""
    job = controller.job
    job.restarts = controller.restarts = restarts
    stop = JobStop(tmp_path / ".stop", job, AHEAD, clock=clock)
    with stop.listening():
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        stop.settle()
        assert mentions(str(stop.other_than_preemption()), expected_words)


@pytest.mark.parametrize(("left", "reason"), [(3600.0, "SIGUSR2"), (AHEAD + 10.0, None)])
def test_usr2_is_a_preemption_unless_the_limit_is_near(
    tmp_path: Path, clock: FakeClock, controller: FakeController, left: float, reason: str | None
) -> None:
    controller.ends = clock.now + 3600.0
    stop = JobStop(tmp_path / ".stop", controller.job, AHEAD, clock=clock)
    clock.sleep(3600.0 - left)
    with stop.listening():
        signal.raise_signal(signal.SIGUSR2)
        assert stop.check() == reason
