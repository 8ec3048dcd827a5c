"""Events as text, folded into progress, and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from messages import alike
from rich.console import Console

from ortflow.launchers.status import read_status
from ortflow.launchers.view.lines import duration, format_event, size
from ortflow.launchers.view.live import LiveView, panel
from ortflow.launchers.view.plain import PlainView
from ortflow.launchers.view.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.oom import oom_kills


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "step", "time": 1000.0 + number / 2, "attempt": 0, "rank": 0, "step": number, "loss": 2.5, "lr": 0.001,
        "grad_norm": 0.5, "seconds": 0.5, "samples": 16, "epoch": 0, **fields,
    }  # fmt: skip


def reported(*records: dict[str, Any], every: int = 1) -> tuple[Progress, list[str]]:
    progress, lines = Progress(total_steps=100), []
    for record in records:
        progress.apply(record)
        text = format_event(record, progress, every)
        if text is not None:
            lines.append(text)
    return progress, lines


def test_steps_are_reported_at_the_period() -> None:
    progress, lines = reported(*(step(number) for number in range(1, 21)), every=10)
    assert lines == [
        "step 10/100  loss 2.5000  lr 0.001  |g| 0.500  32 samples/s  45 s left",
        "step 20/100  loss 2.5000  lr 0.001  |g| 0.500  32 samples/s  40 s left",
    ]
    assert progress.seconds_left == pytest.approx(40.0)


@pytest.mark.parametrize("moved", [-7200.0, 7200.0])
def test_estimates_survive_a_clock_that_is_set(moved: float) -> None:
    before = [step(number) for number in range(1, 21)]
    after = [step(number, time=1000 + moved + number / 2) for number in range(21, 31)]
    progress, _ = reported({"event": "attempt_start", "time": 1000.0}, *before, after[0])
    assert progress.seconds_left is None
    for record in after[1:]:
        progress.apply(record)
    assert progress.seconds_left == pytest.approx(35.0)


@pytest.mark.parametrize(
    "between", [{"event": "evaluation", "seconds": 300.0}, {"event": "checkpoint", "stall_seconds": 300.0}]
)
def test_estimates_contain_long_evaluations_and_saves(between: dict[str, Any]) -> None:
    before = [step(number) for number in range(1, 21)]
    progress, _ = reported({"event": "attempt_start", "time": 1000.0}, *before, {**between, "time": 1310.0, "step": 20})
    progress.apply(step(21, time=1310.5))
    assert progress.seconds_per_step == pytest.approx((300 + 19 * 0.5) / 19)


def test_estimates_leave_the_warm_up_out() -> None:
    """The first steps took a minute, the others 0.5 s, and an evaluation of 10 s every 20 steps."""
    slow = [step(1, time=1060.0, seconds=60.0, tokens=512), step(2, time=1080.0, seconds=20.0, tokens=512)]
    progress, lines = reported({"event": "attempt_start", "time": 1000.0}, *slow)
    assert (progress.started, progress.seconds_left) == (1000.0, None)
    assert "left" not in lines[-1]
    rest = [step(n, time=1080 + (n - 2) * 0.5 + 10 * (n // 20), tokens=512) for n in range(3, 43)]
    progress, lines = reported({"event": "attempt_start", "time": 1000.0}, *slow, *rest)
    assert progress.seconds_per_step == pytest.approx(0.5 + 20 / 40)
    assert progress.seconds_left == pytest.approx(58.0)
    assert lines[-1].endswith("|g| 0.500  1,024 tokens/s  32 samples/s  58 s left")
    text = drawn(panel("gpt", progress, 0, now=1110.0))
    assert "1,024 tokens/s  32 samples/s" in text
    assert "1:50 min" in text


def test_a_clock_that_is_set_back_gives_no_negative_time() -> None:
    times = [100.0, 101.0, 102.0, 103.0, 4.0, 5.0, 6.0]
    progress = Progress(total_steps=107)
    for number, moment in enumerate(times, 1):
        progress.apply({**step(number), "time": moment})
        assert progress.seconds_left is None or progress.seconds_left >= 0
    assert progress.seconds_left == 100.0, "a second for each step"


def test_a_loss_that_is_not_finite_is_reported() -> None:
    _, lines = reported(step(1, loss=None, grad_norm=None, samples=None, seconds=0.0))
    assert lines == ["step 1/100  loss not finite  lr 0.001"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"event": "phase_end", "phase": "configure", "seconds": 1.25}, "configure: 1.2 s"),
        ({"event": "phase_end", "phase": "train", "seconds": 1.25}, None),
        ({"event": "evaluation", "step": 5, "accuracy": 0.5, "loss": 1.5, "samples": 9, "seconds": 1.0},
         "evaluation at step 5: … loss 1.5000  accuracy 0.5000"),
        ({"event": "checkpoint", "step": 5, "seconds": 0.25, "stall_seconds": 0.012, "bytes": 39_100_000},
         "checkpoint at step 5: … 39 MB … 0.2 s … 12 ms"),
        ({"event": "rewind", "from_step": 9, "to_step": 5}, "steps 6 to 9 …"),
        ({"event": "checkpoint_rejected", "path": "/c", "reason": "torn"},
         "warning: checkpoint /c is skipped: torn"),
        ({"event": "of the future", "step": 5}, None),
    ],
)  # fmt: skip
def test_lines(record: dict[str, Any], words: str | None) -> None:
    assert alike(reported(record)[1], [] if words is None else [words])


def test_progress_follows_a_restart() -> None:
    progress, _ = reported(
        step(7),
        {"event": "checkpoint", "step": 5},
        {"event": "attempt_start", "time": 2000.0},
        {"event": "rewind", "from_step": 7, "to_step": 5},
        {"event": "resume", "step": 5},
    )
    assert (progress.step, progress.checkpoint, progress.seconds_per_step) == (5, 5, None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"), (4e-5, "40 us"), (9.996e-4, "1 ms"), (0.0123, "12 ms"), (0.06, "0.1 s"), (4.25, "4.2 s"),
        (42, "42 s"), (65, "1:05 min"), (12000, "3:20 h"), (260000, "3 days 0 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_sizes() -> None:
    assert [size(count) for count in (12, 3400, 39_100_000, 5e9, 7e12)] == [
        "12 B",
        "3.4 kB",
        "39 MB",
        "5.0 GB",
        "7.0 TB",
    ]


def drawn(renderable: Any) -> str:
    console = Console(file=StringIO(), width=70, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", range(40, 101, 4))
def test_the_panel_breaks_no_line_between_a_number_and_its_name(width: int) -> None:
    progress = Progress(evaluation={"loss": 1.25, "accuracy": 0.9876, "perplexity": 123456.789}, evaluation_step=123456)
    progress.loss, progress.lr = 2.5, 1e-3
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(panel("gpt", progress, 0, now=1.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "loss 1.2500",
        "accuracy 0.9876",
        "perplexity 123456.7890",
        "(step 123456)",
        "lr 0.001",
    ):
        assert part in text, text


def test_panel_shows_what_is_known() -> None:
    progress, _ = reported(
        {"event": "attempt_start", "time": 1000.0},
        {"event": "phase_start", "phase": "train"},
        *(step(number) for number in range(41, 51)),
        {"event": "evaluation", "step": 40, "loss": 1.5},
        {"event": "checkpoint", "step": 40},
        {"event": "checkpoint_start", "step": 50},
    )
    text = drawn(panel("gpt", progress, 2, now=1025.0))
    for words in (
        "gpt",
        "50/100",
        "25 s  25 s left",
        "2.5000",
        "loss 1.5000  (step 40)",
        "step 40  saving",
        "restarts",
    ):
        assert words in text
    assert "no event for" not in text
    assert "no event for 1:00 min" in drawn(panel("gpt", Progress(time=1000.0), 0, now=1060.0))


def test_live_view_draws_and_scrolls(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=70, force_terminal=True)
    run = RunDir(tmp_path)
    run.plan.write_text(json.dumps({"total_steps": 20}))
    with LiveView(run, "gpt", console) as view:
        view.record({"event": "phase_start", "phase": "train"})
        view.record(step(10))
        view.tick()
        view.record({"event": "warning", "message": "hot"})
        view.message(f"exported {'/very/long' * 20} and more")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "10/20" in text
    assert "warning: hot" in text
    assert f"exported {'/very/long' * 20} and more\n" in text, "names stay whole"


def test_plain_view_prints_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    PlainView(RunDir(tmp_path), 1).record(step(1))
    assert capfd.readouterr().out.endswith("  step 1  loss 2.5000  lr 0.001  |g| 0.500  32 samples/s\n")


def test_the_run_continues_when_its_reader_is_gone(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from ortflow.launchers.view.plain import PlainView\n"
        "view = PlainView(pathlib.Path(), 1); sys.stdin.read(); view.message('a'); view.message('b'); sys.exit(7)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert child.stdin
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    child.stdin.close()
    assert (child.wait(), child.stderr.read()) == (7, b"")
    child.stderr.close()


def test_status_of_a_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    run.root.mkdir()
    run.run_file.write_text("name: other\n")
    run.plan.write_text(json.dumps({"total_steps": 20}))
    run.events(0).parent.mkdir()
    run.events(0).write_text("".join(json.dumps(record) + "\n" for record in (step(1), step(2))) + '{"event": "st')
    run.record_attempt(event="submit", launcher="local", new_budget=False)
    run.record_attempt(event="start", attempt=0)
    how = read_status(run).to_json()
    assert {key: how[key] for key in ("name", "state", "step", "total_steps", "loss", "attempts", "pid")} == {
        "name": "other", "state": "lost", "step": 2, "total_steps": 20, "loss": 2.5, "attempts": 1, "pid": None,
    }  # fmt: skip


def test_out_of_memory_kills_are_counted_where_the_kernel_reports_them(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert oom_kills(proc, cgroups) is None
    (proc / "vmstat").write_text("pgfault 9\noom_kill 4\n")
    (proc / "self" / "cgroup").write_text("0::/user\n")
    assert oom_kills(proc, cgroups) == 4
    (cgroups / "user").mkdir(parents=True)
    (cgroups / "user" / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert oom_kills(proc, cgroups) == 1
    (proc / "self" / "cgroup").write_text("4:memory:/mine\n0::/\n")
    (cgroups / "memory" / "mine").mkdir(parents=True)
    (cgroups / "memory" / "mine" / "memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    assert oom_kills(proc, cgroups) == 3


def test_an_early_stop_says_which_parameters_are_exported() -> None:
    stop = {"event": "early_stop", "step": 30, "metric": "loss"}
    _, (line, without) = reported({**stop, "best": 0.41, "best_step": 10}, stop)
    assert "0.4100 at step 10" in line
    assert "step 30" in line
    assert "best" not in without


def test_lines_of_steps_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 1,000 steps a second is a line a second, and no number is missing at its end."""
    with PlainView(RunDir(tmp_path), 10) as view:
        for number in range(1, 3456):
            view.record(step(number, time=1000.0 + number / 1000))
        view.record({"event": "finished", "step": 3455, "time": 1004.0})
    shown = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["step 10", "step 1010", "step 2010", "step 3010", "step 3450", "finished at step 3455"]


def test_a_clock_that_is_set_back_silences_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(RunDir(tmp_path), 1) as view:
        view.record(step(1, time=5000.0))
        view.record(step(2, time=1000.0))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_check_of_the_gradient_is_a_phase(tmp_path: Path) -> None:
    started = {"event": "phase_start", "phase": "check", "time": 1.0}
    progress, _ = reported(started)
    assert progress.phase == "check"
    _, lines = reported(*({"event": "phase_end", "phase": "check", "seconds": seconds} for seconds in (17.2, 0.01)))
    assert lines == ["check: 17 s"]
