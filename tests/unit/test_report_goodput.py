"""`ortflow goodput`: one run, many runs, users and weeks; damaged and missing records."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from recorded_runs import write_run
from typer.testing import CliRunner

from ortflow.cli.app import command_line
from ortflow.launchers.report import rank_records
from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.goodput import seconds_of, since
from ortflow.launchers.report.survey import survey
from ortflow.launchers.report.timeline import MICRO
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir


def goodput(*arguments: str | Path) -> str:
    done = CliRunner().invoke(command_line("goodput"), ["goodput", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_one_run_is_a_table_of_causes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=60, kills=2, slow_rank=1)
    text = goodput(run.root)
    assert "a: finished, goodput" in text
    for title in ("productive step", "data wait", "lost work", "recovery", "2 disruptions, 4 steps run again"):
        assert title in text
    assert "Rank 1 is slower than its peers" in text
    found = json.loads(goodput(run.root, "--json"))
    (row,) = found["runs"]
    assert sum(row["seconds"].values()) == pytest.approx(row["wall_seconds"], abs=1e-6)
    assert row["seconds"]["data_wait"] == pytest.approx(60 * 0.1, abs=1e-3)  # the slow rank's, not rank 0's
    assert row["data_wait"]["slowest_rank"] == 1
    assert [one["node"] for one in row["restarts"]] == ["n0", "n0"]
    assert [one["failures_left"] for one in row["restarts"]] == [2, 1]


def test_runs_are_added_up_by_user_and_week(tmp_path: Path) -> None:
    week = 7 * 86400
    for place in range(3):
        write_run(tmp_path / f"run-{place}", begin=1_790_000_000 + place * week)
    found = json.loads(goodput(tmp_path, "--json"))
    assert len(found["runs"]) == 3
    for sums in (found["users"], found["weeks"]):
        assert sum(one["wall_seconds"] for one in sums.values()) == pytest.approx(found["total"]["wall_seconds"])
        assert sum(one["seconds"]["step"] for one in sums.values()) == pytest.approx(found["total"]["seconds"]["step"])
    assert list(found["weeks"]) == ["2026-W39", "2026-W40", "2026-W41"]
    text = goodput(tmp_path)
    assert "run-2" in text
    assert "2026-W40" in text
    assert json.loads(goodput(tmp_path, "--json", "--since", "1m"))["total"]["wall_seconds"] == 0
    assert "no runs in" in goodput(tmp_path / "run-0" / "events")


def test_a_period_divides_a_run_without_losing_time(tmp_path: Path) -> None:
    found = survey(write_run(tmp_path / "a"), now=1_800_000_000.0).account
    middle = (found.start + found.end) // 2
    halves = since(found, None, middle), since(found, middle)
    assert sum(sum(half.values()) for half in halves) == found.wall
    assert sum(half[Cause.DATA_WAIT] for half in halves) == pytest.approx(found.totals[Cause.DATA_WAIT], abs=2)
    assert (seconds_of("7d"), seconds_of("1.5h")) == (7 * 86400, 5400)
    with pytest.raises(UserError, match="7x"):
        seconds_of("7x")


def test_of_large_records_windows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", steps=3000, ranks=3, kills=2, slow_rank=2)
    whole = survey(run, now=1_800_000_000.0)
    monkeypatch.setattr(rank_records, "WHOLE", 0)
    sampled = survey(run, now=1_800_000_000.0)
    assert 200 < sampled.waits.steps < 2000
    assert whole.waits.slowest == sampled.waits.slowest == 2
    assert [one.spans for one in whole.ranks.records] == [one.spans for one in sampled.ranks.records]
    assert [one.hosts for one in whole.ranks.records] == [one.hosts for one in sampled.ranks.records]
    waits = [one.account.totals[Cause.DATA_WAIT] / MICRO for one in (whole, sampled)]
    assert waits[1] == pytest.approx(waits[0], rel=0.01)
    assert any("estimated from" in note for note in sampled.account.notes)


def test_damage_is_reported_and_is_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", ranks=3)
    with run.events(0).open("a") as file:
        file.write('{"event":"step","step":99,"ti')  # torn, as of a run that is writing
    with run.attempts.open("a") as file:
        file.write("\0\0\0\nnonsense\n")
    run.events(1).unlink()
    run.events(2).unlink()
    os.mkfifo(run.events(2))
    text = goodput(run.root)
    assert "no record of ranks 1, 2" in text
    assert "not valid records" in text
    run.events(0).unlink()
    assert "a: finished, goodput unknown of" in goodput(run.root)
    run.attempts.write_text("")
    assert "goodput - of" in goodput(run.root)


def test_a_run_without_steps_and_one_that_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=60, running=True, kills=0, begin=time.time() - 60)
    found = survey(run, time.time())
    assert found.account.wall == sum(found.account.totals.values())
    empty = RunDir(tmp_path / "empty")
    empty.root.mkdir()
    empty.run_file.write_text("name: empty\n")
    assert "empty" in goodput(tmp_path)
