"""`ortflow list` and `top`: the evaluation, its best value, and all runs in 80 columns."""

from __future__ import annotations

import json
import time
from pathlib import Path

from recorded_runs import write_run
from typer.testing import CliRunner

from ortflow.cli.app import command_line
from ortflow.cli.top import Overview
from ortflow.launchers.status import read_status
from ortflow.launchers.view.best import Best, best_of, main_metric
from ortflow.workflow.run.rundir import RunDir


def evaluation(step: int, **values: float | None) -> str:
    return (
        json.dumps(
            {"event": "evaluation", "time": 1.0 * step, "step": step, "samples": 4, "seconds": 0.1, **values},
            separators=(",", ":"),
        )
        + "\n"
    )


def test_the_best_is_of_all_evaluations_however_long_the_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    (run.root / "events").mkdir(parents=True)
    run.run_file.write_text("name: a\n")
    step = '{"event":"step","time":1.0,"step":1,"loss":1.0,"seconds":0.1,"samples":4}\n'
    text = evaluation(1, loss=2.0, accuracy=0.75) + evaluation(2, loss=None, accuracy=None) + 30_000 * step
    run.events(0).write_text(text + evaluation(3, loss=1.0, accuracy=0.5) + '{"event":"evaluation","step":9,"accur')
    assert best_of(run.events(0), "accuracy") == Best("accuracy", 0.75, 1)
    assert best_of(run.events(0), "loss") == Best("loss", 1.0, 3)
    how = read_status(run)
    assert (how.metric, how.best_value, how.best_step) == ("accuracy", 0.75, 1)
    text = CliRunner().invoke(command_line("list"), ["list", "--runs-dir", str(tmp_path)]).output
    assert "accuracy 0.5000" in text
    assert "0.7500 at 1" in text


def test_the_metric_of_checkpoint_best_comes_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    (run.root / "events").mkdir(parents=True)
    run.run_file.write_text("name: a\n")
    best = {"metric": "worst", "value": 9.0, "step": 2}
    saved = json.dumps({"event": "checkpoint", "time": 1.0, "step": 2, "bytes": 1, "seconds": 1.0, "best": best})
    values = [evaluation(step, loss=1.0, accuracy=0.5, worst=11.0 - step) for step in (1, 2)]
    run.events(0).write_text(
        "".join(values) + saved.replace(", ", ",").replace(": ", ":") + "\n" + evaluation(3, loss=1.0, worst=9.5)
    )
    how = read_status(run)
    assert (how.metric, how.best_value, how.best_step) == ("worst", 9.0, 2)
    text = CliRunner().invoke(command_line("list"), ["list", "--runs-dir", str(tmp_path)]).output
    assert "worst 9.5000" in text
    assert "9.0000 at 2" in text


def test_only_a_metric_with_a_known_direction_has_a_best() -> None:
    assert main_metric({"loss": 1.0, "set/accuracy": 0.5}) == "set/accuracy"
    assert main_metric({"loss": 1.0, "bleu": 0.5}) == "loss"
    assert main_metric({"bleu": 0.5}) is None
    assert main_metric({}) is None


def test_top_shows_all_runs_in_80_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "finished-with-a-rather-long-name", kills=1)
    write_run(tmp_path / "other", running=True, kills=2, begin=time.time() - 100)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.yaml").write_text("name: empty\n")
    (tmp_path / "no-run").mkdir()
    done = CliRunner().invoke(command_line("top"), ["top", str(tmp_path), "--once", "--sort", "name"])
    assert done.exit_code == 0, done.output
    head, *rows = done.output.splitlines()
    assert head.split() == ["NAME", "STATE", "STEP", "LEFT", "LOSS", "TREND", "RESTARTS", "GOOD"]
    assert [row.split()[0] for row in rows] == ["empty", "finished-with-a-rather-long-name", "other"]
    assert "60/60" in rows[1]
    assert "█" in rows[1]
    lines = Overview(tmp_path, "state").lines(80, 24)
    assert all(len(line) <= 80 for line in lines)
    assert len(Overview(tmp_path, "state").lines(80, 3)) == 3
    assert (
        CliRunner()
        .invoke(command_line("top"), ["top", str(tmp_path / "no-run"), "--once"])
        .output.startswith("no runs")
    )
