"""Messages about a run that was preempted and is not back: a supervisor that lives, one that is dead, the next one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt, write_step
from fake_clock import FakeClock
from messages import mentions
from signal_handlers import restored
from test_slurm_run_supervisor import RUN, FakeController, PlannedRanks
from views import Lines

from ortflow.launchers.batch.job_supervisor import RunSupervisor
from ortflow.launchers.batch.stopping import SIGNALS
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision import notices
from ortflow.launchers.supervision.absence_notices import absence, attempts_back, current
from ortflow.launchers.supervision.supervised import Job
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.workflow.errors import EXIT_DONE, EXIT_PREEMPTED, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.restart import Backoff, Restart


def writes(path: Path) -> list[str]:
    """A command that appends what it gets to a file."""
    return [sys.executable, "-c", f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + chr(10))"]


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock passes minutes while a command that gets a message starts."""
    monkeypatch.setattr(notices, "LIMIT", 5000.0)


def supervise(run: RunDir, clock: FakeClock, sinks: list[Notify], *, first_step: float) -> None:
    """Attempt 0 is preempted after 5 s; attempt 1 makes its first step after `first_step` seconds."""

    def start(number: int) -> FakeAttempt:
        if number == 0:
            write_step(run, 0, 1)
            return FakeAttempt(clock, 0, code=EXIT_PREEMPTED, seconds=5.0)
        clock.after(first_step, lambda: write_step(run, 1, 2))
        return FakeAttempt(clock, 1, code=EXIT_DONE, seconds=first_step + 5.0)

    restart = Restart(backoff=Backoff(first=0.0), hung_seconds=None)
    job = Job(run, 1, restart, start, lambda: None, notify=sinks)
    Supervisor(job, Lines(), Stop(run.stop_request, clock=clock), clock).supervise()


def test_a_supervisor_that_lives_says_so_and_reports_the_return(tmp_path: Path) -> None:
    sinks = [
        Notify(on=["not_back"], not_back_seconds=60.0, command=writes(tmp_path / "a")),
        Notify(on=["not_back"], not_back_seconds=900.0, command=writes(tmp_path / "late")),
        Notify(on=["finished"], command=writes(tmp_path / "other")),
    ]
    supervise(RunDir(tmp_path / "run"), FakeClock(), sinks, first_step=700.0)
    texts = {one["event"]: one["text"] for one in messages(tmp_path / "a")}
    assert mentions(texts["not_back"], "not back 1:00 min after attempt 0 ended at step 1 (saved and stopped)"), texts
    assert texts["back"].startswith("back 11:4"), texts
    assert messages(tmp_path / "late") == []
    assert [one["event"] for one in messages(tmp_path / "other")] == ["finished"]


def test_a_run_that_is_back_in_time_is_not_mentioned(tmp_path: Path) -> None:
    sinks = [Notify(on=["not_back"], not_back_seconds=60.0, command=writes(tmp_path / "a"))]
    supervise(RunDir(tmp_path / "run"), FakeClock(), sinks, first_step=30.0)
    assert messages(tmp_path / "a") == []


def test_attempts_that_end_before_a_step_do_not_begin_the_absence_anew(tmp_path: Path) -> None:
    """Preempted every 40 s while it starts: no attempt waits as long as the limit."""
    sinks = [Notify(on=["not_back"], not_back_seconds=60.0, command=writes(tmp_path / "a"))]
    run, clock = RunDir(tmp_path / "run"), FakeClock()

    def start(number: int) -> FakeAttempt:
        if number in (1, 2):
            return FakeAttempt(clock, number, code=EXIT_PREEMPTED, seconds=40.0)
        clock.after(1.0, lambda: write_step(run, number, 1 + number))
        code = EXIT_DONE if number == 3 else EXIT_PREEMPTED
        return FakeAttempt(clock, number, code=code, seconds=5.0)

    job = Job(run, 1, Restart(backoff=Backoff(first=0.0), hung_seconds=None), start, lambda: None, notify=sinks)
    Supervisor(job, Lines(), Stop(run.stop_request, clock=clock), clock).supervise()
    texts = {one["event"]: one["text"] for one in messages(tmp_path / "a")}
    assert mentions(texts["not_back"], "not back 1:00 min after attempt 0 ended at step 1"), texts
    assert texts["back"].startswith("back 1:2"), texts


def preempted_on_slurm(root: Path, controller: FakeController) -> None:
    run = RunDir(root)
    command = json.dumps(writes(root.parent / "told"))
    run.run_file.write_text(
        f"{RUN}monitor: {{notify: [{{on: [not_back], not_back_seconds: 900.5, command: {command}}}]}}\n"
    )
    write_step(run, 0, 7)
    controller.preempted = "2026-11-21T13:59:34"
    ranks = PlannedRanks(controller.clock, code=EXIT_PREEMPTED, seconds=10.0)
    with restored(*SIGNALS):
        RunSupervisor(run, ranks, controller.job, "ortflow abc", controller.clock).keep()


def test_slurm_starts_a_job_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor is dead while its job waits in the queue: a job of seconds sends the message, once."""
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "a1")
    root = tmp_path / "run"
    root.mkdir()
    controller = FakeController(FakeClock(unix=time.time() - 100.0))
    controller.takes = True
    preempted_on_slurm(root, controller)
    (submitted,) = [call for call in controller.calls if call[0] == "sbatch"]
    assert {"--begin=now+901", "--ntasks=1", "--partition=gpu", "--account=a1", "--job-name=gpt-not-back"} < {
        *submitted
    }
    script = next(one for one in submitted if one.endswith("not_back.sh"))
    subprocess.run(["sh", script], check=True)
    assert messages(tmp_path / "told") == [], "100 s after the end it is too early"
    records = (root / "attempts.jsonl").read_text()
    end = absence(RunDir(root).read_attempts())
    assert end is not None
    (root / "attempts.jsonl").write_text(records.replace(str(end.since), str(end.since - 2000.0)))
    for _ in range(2):
        subprocess.run(["sh", script], check=True)
    (message,) = messages(tmp_path / "told")
    assert (message["event"], message["step"]) == ("not_back", 7)
    write_step(RunDir(root), 1, 8)
    assert current(RunDir(root)) is None


def test_where_slurm_takes_no_such_job_the_log_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    root.mkdir()
    preempted_on_slurm(root, FakeController(FakeClock()))
    assert "warning: nothing can send the message not_back before the run is back: " in capfd.readouterr().out


def test_the_next_supervisor_reports_a_return_of_which_nobody_was_told(tmp_path: Path) -> None:
    """The node of the last supervisor was lost: it has recorded no end, and left nobody who looks."""
    run, clock = RunDir(tmp_path / "run"), FakeClock()
    run.record_attempt(event="start", attempt=0)
    write_step(run, 0, 4)  # at the time 1.0
    sinks = [Notify(on=["not_back"], command=writes(tmp_path / "told"))]

    def start(number: int) -> FakeAttempt:
        clock.after(1.0, lambda: write_step(run, number, 5))
        return FakeAttempt(clock, number, seconds=5.0)

    job = Job(run, 1, Restart(hung_seconds=None), start, lambda: None, notify=sinks)
    Supervisor(job, Lines(), Stop(run.stop_request, clock=clock), clock).supervise()
    assert {one["event"] for one in messages(tmp_path / "told")} == {"not_back", "back"}


def test_what_an_absence_is() -> None:
    end = {
        "event": "end",
        "attempt": 2,
        "time": 5.0,
        "outcome": "preempted",
        "next": "restart",
        "step": 9,
        "cause": "c",
    }
    gone = absence([end])
    assert gone is not None
    assert (gone.attempt, gone.since, gone.step) == (2, 5.0, 9)
    later = [end, {**end, "attempt": 3, "time": 7.0}]
    assert absence(later) == gone
    rewind = {"event": "rewind", "attempt": 4, "spans": [[3, 6.0, 7.0]]}
    again = absence(later, attempts_back([{"event": "step", "attempt": 2}, rewind]))
    assert again is not None
    assert (again.attempt, again.since) == (3, 7.0), "the rewound record does not have its steps any more"
    assert absence([{**end, "attempt": 1, "next": "stop"}, *later]) == gone
    older = {**end, "attempt": 1, "time": 2.0, "step": 8}
    assert absence([older, *later]) == gone, "attempt 2 has made a step, whether its events are read or not"
    assert gone.ended_by({"event": "program_start", "attempt": 3})
    assert not gone.ended_by({"event": "step", "attempt": 2})
    assert absence([end, {"event": "start", "attempt": 3}]) == gone
    assert absence([end, {"event": "stop", "outcome": "preempted"}]) is None
    assert absence([{**end, "next": "stop"}]) is None
    assert absence([]) is None
    del end["time"]  # of a damaged record
    assert absence([end]) is None


def test_a_limit_without_its_message_is_reported() -> None:
    text = f"{RUN}monitor: {{notify: [{{on: [finished], not_back_seconds: 60, command: [mail]}}]}}\n"
    with pytest.raises(UserError, match=r"monitor\.notify\[0\]\.not_back_seconds"):
        load_run_text(text, "run.yaml")
