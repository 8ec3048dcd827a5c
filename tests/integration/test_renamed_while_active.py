"""A run directory that is renamed or removed while its run is active: the run saves where it went, and says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import mentions
from project import curve, logs, of_kind
from tiny_runs import Tiny, result
from waits import PATIENCE, wait_until

LONG = ("train.steps=1000000", "monitor.every_steps=1000")
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def started(tiny: Tiny, *arguments: str) -> subprocess.Popen[str]:
    """A run that has passed its first steps."""
    running = tiny.start("run", "run.yaml", *LONG, *arguments)
    record = tiny.run_dir / "events/rank-0000.jsonl"
    until(lambda: record.exists() and b'"event":"step"' in record.read_bytes(), running)
    return running


def until(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    wait_until(condition, alive=lambda: running.poll() is None, output=running.communicate)


def ended(running: subprocess.Popen[str]) -> str:
    out, err = running.communicate(timeout=PATIENCE)
    return out + err


@RANKS
@pytest.mark.rotates
def test_a_renamed_run_saves_where_it_went(tmp_path: Path, ranks: int) -> None:
    tiny = Tiny.make(tmp_path / "p", checkpoint={"every_steps": 50})
    running = started(tiny, f"resources.ranks_per_node={ranks}")
    there = tiny.run_dir.with_name("other")
    tiny.run_dir.rename(there)
    said = ended(running)
    assert running.returncode == 75, said + logs(there)
    assert mentions(said, str(tiny.run_dir), str(there), "resume")
    assert not tiny.run_dir.exists(), sorted(tiny.run_dir.rglob("*"))
    (end,) = [json.loads(line) for line in (there / "attempts.jsonl").read_text().splitlines() if '"end"' in line]
    assert (end["outcome"], end["next"]) == ("preempted", "stop")
    assert str(there) in end["cause"]
    step = of_kind(there, "preempted")[-1]["step"]
    assert (there / f"checkpoints/step-{step:08d}/COMMITTED").exists()
    assert tiny.command("status", "other").code == 0
    done = tiny.command("resume", "other", f"train.steps={step + 20}")
    assert done.code == 0, done.said
    assert not tiny.run_dir.exists()
    straight = tiny.command("run", "run.yaml", f"train.steps={step + 20}", f"resources.ranks_per_node={ranks}")
    assert straight.code == 0, straight.said
    assert result(there) == result(tiny.run_dir)
    assert curve(there)[-1][0] == step + 20


def test_another_run_in_its_place_is_left_alone(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", checkpoint={"every_steps": 50})
    assert tiny.command("run", "run.yaml", "name=finished").code == 0
    running = started(tiny)
    there, finished = tiny.run_dir.with_name("other"), tiny.run_dir.with_name("finished")
    tiny.run_dir.rename(there)
    finished.rename(tiny.run_dir)
    before = {path: path.read_bytes() for path in tiny.run_dir.rglob("*") if path.is_file()}
    said = ended(running)
    assert running.returncode == 75, said
    assert {path: path.read_bytes() for path in tiny.run_dir.rglob("*") if path.is_file()} == before


@RANKS
@pytest.mark.rotates
def test_a_removed_run_ends_with_its_cause(tmp_path: Path, ranks: int) -> None:
    tiny = Tiny.make(tmp_path / "p", checkpoint={"every_steps": 50})
    running = started(tiny, f"resources.ranks_per_node={ranks}")
    # In one go: what a run writes meanwhile would make rmtree fail.
    tiny.run_dir.rename(tmp_path / "trash")
    shutil.rmtree(tmp_path / "trash", ignore_errors=True)
    shutil.rmtree(tmp_path / "trash", ignore_errors=True)
    said = ended(running)
    assert running.returncode == 1, said
    assert mentions(said, str(tiny.run_dir), "removed")
    assert "Traceback" not in said
    assert not tiny.run_dir.exists(), sorted(tiny.run_dir.rglob("*"))


def test_renamed_between_two_attempts(tmp_path: Path) -> None:
    pause = {"failures": 3, "backoff": {"first": 4.0, "limit": 4.0}}
    tiny = Tiny.make(tmp_path / "p", checkpoint={"every_steps": 50}, restart=pause)
    running = started(tiny)
    os.kill(of_kind(tiny.run_dir, "attempt_start")[-1]["pid"], signal.SIGKILL)
    until(lambda: '"end"' in (tiny.run_dir / "attempts.jsonl").read_text(), running)
    there = tiny.run_dir.with_name("other")
    tiny.run_dir.rename(there)
    said = ended(running)
    assert running.returncode == 75, said
    assert mentions(said, str(there), "between two attempts")
    assert os.listdir(tiny.folder / "runs") == ["other"]
    assert json.loads(tiny.command("status", "other", "--json").out)["state"] == "preempted"


def test_in_the_background_too(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", checkpoint={"every_steps": 50})
    assert tiny.command("run", "run.yaml", *LONG, "--detach").code == 0
    record = tiny.run_dir / "events/rank-0000.jsonl"
    end = time.monotonic() + PATIENCE
    while not (record.exists() and b'"event":"step"' in record.read_bytes()):
        assert time.monotonic() < end
        time.sleep(0.05)
    there = tiny.run_dir.with_name("other")
    tiny.run_dir.rename(there)
    while '"end"' not in (there / "attempts.jsonl").read_text():
        assert time.monotonic() < end, logs(there)
        time.sleep(0.1)
    status = json.loads(tiny.command("status", "other", "--json").out)
    assert status["state"] in ("preempted", "restarting"), status
    assert str(there) in (there / "logs/supervisor.log").read_text()
    assert os.listdir(tiny.folder / "runs") == ["other"]
