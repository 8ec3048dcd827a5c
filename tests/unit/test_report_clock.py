"""Accounts of runs whose clock was set meanwhile, or whose records are not all there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from recorded_runs import BEGIN, write_run

from ortflow.cli.status import describe
from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.state import sentence
from ortflow.launchers.report.survey import Survey, survey
from ortflow.workflow.run.rundir import RunDir

DAY = 86400.0
LATER = BEGIN + 3600.0


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def forward(run: RunDir, until: float) -> None:
    """A day ahead from step 41 on; set back before step `until`. The run's second attempt makes steps 31 to 60."""
    ahead = False

    def move(row: dict[str, Any]) -> None:
        nonlocal ahead
        if row["event"] == "step" and row["step"] in (41, until):
            ahead = row["step"] == 41
        row["time"] += DAY * ahead

    changed(run.events(0), move)
    if ahead:
        changed(run.attempts, lambda row: row.update(time=row["time"] + DAY * (row.get("outcome") == "finished")))


def account_of(run: RunDir) -> Survey:
    return survey(run, LATER)


@pytest.mark.parametrize("until", [45, 1000])
def test_a_clock_that_is_set_forward_costs_nothing(tmp_path: Path, until: int) -> None:
    calm = account_of(write_run(tmp_path / "calm")).account
    run = write_run(tmp_path / "run")
    forward(run, until)
    found = account_of(run).account
    assert found.goodput == pytest.approx(calm.goodput, abs=0.01)
    assert found.wall == pytest.approx(calm.wall, abs=1e6)
    said = "; ".join(found.notes)
    assert mentions(said, "the clock was set forward by 24:00 h, or the machine slept, before step 41"), said
    assert ("set back by 24:00 h" in said) == (until == 45)


def test_an_active_run_with_a_clock_that_is_ahead(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", running=True)
    calm = survey(run, BEGIN + 60.0).account
    forward(run, 1000)
    found = survey(run, BEGIN + 60.0 + DAY).account
    assert found.wall == pytest.approx(calm.wall, abs=1e6)


def test_a_long_evaluation_is_not_a_clock_that_was_set(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", step_seconds=2000.0, kills=0)
    assert account_of(run).account.notes == []


def test_what_is_not_on_record_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    lost = write_run(tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost/events")
    found = account_of(lost).account
    assert found.goodput is None
    assert "the events of rank 0 are missing, so that its productive time is unknown" in found.notes
    old = write_run(tmp_path / "old")
    changed(old.events(0), lambda row: row.pop("seconds", None) if row["event"] == "step" else None)
    found = account_of(old).account
    assert found.goodput is None
    assert mentions("; ".join(found.notes), "its steps are recorded without their time")
    bare = write_run(tmp_path / "bare")
    bare.attempts.unlink()
    assert mentions("; ".join(account_of(bare).account.notes), "attempts.jsonl is missing or empty")


def test_an_attempt_that_ended_before_its_first_event_was_starting(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "crashed")
    run.root.mkdir()
    run.run_file.write_text(f"name: crashed\nrun_dir: {run.root}\n")
    end = {"event": "end", "attempt": 0, "outcome": "failure", "step": 0, "cause": "exit code 1", "next": "stop"}
    rows = [{"time": BEGIN, "event": "submit"}, {"time": BEGIN + 1, "event": "start", "attempt": 0, "world_size": 1}]
    run.attempts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"time": BEGIN + 10, **end}]))
    found = account_of(run).account
    assert {cause: seconds for cause, seconds in found.totals.items() if seconds} == {
        Cause.QUEUE: 1_000_000,
        Cause.START: 9_000_000,
    }
    assert found.goodput == 0.0


def test_one_event_of_another_time_moves_no_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", kills=0)
    calm = account_of(run).account
    rows = run.events(0).read_text().splitlines(True)
    odd = json.dumps({"event": "warning", "time": BEGIN + DAY, "attempt": 0, "rank": 0, "message": "x"}) + "\n"
    run.events(0).write_text("".join([*rows[:20], odd, *rows[20:]]))
    found = account_of(run).account
    assert (found.wall, found.notes) == (calm.wall, [])


def test_a_finished_run_without_steps_and_a_record_of_the_future(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", kills=0)
    forward(run, 1000)
    found = account_of(run)
    shown = dict(describe(found.status, LATER))
    assert shown["updated"].endswith(" ahead")
    shutil.rmtree(tmp_path / "run/events")
    assert sentence(account_of(run)) == "run has finished."
