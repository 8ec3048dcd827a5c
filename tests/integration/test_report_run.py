"""A real run that is killed twice: its account, its report while it runs and after it, and its messages."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from project import of_kind
from tiny_runs import Tiny, has_traceback
from waits import PATIENCE

from ortflow.launchers.supervision.processes import family, ranks_among
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir

FAULTS = Path(__file__).parents[1] / "support" / "faults"
STEP = 0.15
"""Seconds by which each step of the first two attempts is longer."""


def test_a_run_that_is_killed_twice(tmp_path: Path) -> None:
    messages = tmp_path / "messages"
    keep = [sys.executable, "-c", f"import sys; open({str(messages)!r}, 'a').write(sys.stdin.read() + chr(10))"]
    tiny = Tiny.make(
        tmp_path / "project",
        train={"steps": 60, "optimizer": {"name": "adamw", "lr": 1e-2}, "evaluation": {"every_steps": 10}},
        data={"train": "set.arrow", "eval": "set.arrow", "micro_batch": 4},
        checkpoint={"every_steps": 5},
        resources={"ranks_per_node": 2, "cpus_per_rank": 1},
        restart={"failures": 2, "backoff": {"first": 0.5, "limit": 0.5}},
        monitor={"every_steps": 1, "notify": [{"on": ["budget_low", "finished", "failed"], "command": keep}]},
    )
    launcher = tiny.start("run", "run.yaml", PYTHONPATH=str(FAULTS), SLOW=f"{STEP} 2")
    for kill, step in enumerate((10, 30)):
        wait_for(tiny.run_dir, step, attempt=kill)
        ranks = ranks_among(family(psutil.Process(launcher.pid)))
        live = tiny.command("report", "tiny", "--json")
        assert not has_traceback(live.said)
        numbers = json.loads(live.out)
        assert numbers["state"] == "running"
        assert "If it were killed now" in numbers["sentence"]
        assert numbers["at_risk"]["checkpoint"] >= 5
        assert len(numbers["restarts"]) == kill
        assert sum(numbers["seconds"].values()) == pytest.approx(numbers["wall_seconds"], abs=1e-5)
        ranks[1].kill()
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, out + err

    numbers = json.loads(tiny.command("report", "tiny", "--json").out)
    found = numbers["seconds"]
    assert sum(found.values()) == pytest.approx(numbers["wall_seconds"], abs=1e-5)
    times = [record["time"] for record in RunDir(tiny.run_dir).read_attempts()]
    assert numbers["wall_seconds"] == pytest.approx(times[-1] - times[0], abs=1e-5)
    assert numbers["sentence"].startswith("tiny has finished at step 60 of 60.")
    rewinds = of_kind(tiny.run_dir, "rewind")
    assert len(numbers["restarts"]) == len(rewinds) == 2
    for restart, rewind in zip(numbers["restarts"], rewinds, strict=True):
        lost = rewind["from_step"] - rewind["to_step"]
        assert restart["steps_lost"] == lost
        assert restart["seconds_lost"] >= STEP * (lost - 1)
        assert "rank 1 was killed by SIGKILL" in restart["cause"]
        assert restart["seconds_to_first_step"] > 0.5
    assert [restart["failures_left"] for restart in numbers["restarts"]] == [1, 0]
    assert found["lost"] == pytest.approx(sum(one["seconds_lost"] for one in numbers["restarts"]), rel=0.2)
    assert found["recovery"] >= 2 * 0.5
    assert (
        min(found[cause] for cause in ("step", "data_wait", "evaluation", "restore", "compile", "start", "export")) > 0
    )
    assert all("data_seconds" in step for step in of_kind(tiny.run_dir, "step"))

    assert "tiny" in tiny.command("goodput").out
    assert tiny.command("report", "tiny").out.strip() == "tiny.html"
    assert "productive step" in (tiny.folder / "tiny.html").read_text()
    sent = [json.loads(line)["event"] for line in messages.read_text().splitlines()]
    assert sent == ["budget_low", "finished"]


def wait_for(run_dir: Path, step: int, *, attempt: int = 0) -> None:
    """Return when the run has done a step, in this attempt or a later one."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        steps = [one for one in read_records(RunDir(run_dir).events(0), EVENTS)[0] if one["event"] == "step"]
        if any(one["step"] >= step and one["attempt"] >= attempt for one in steps):
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}")
