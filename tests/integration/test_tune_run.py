"""`ortflow tune` on this machine: real runs, a trial that fails, a kill in the middle, the table and the best file."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tiny_runs import RUN, Tiny

from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file

pytest.importorskip("optuna", reason="Optuna is not installed")


def test_killed_and_continued_with_a_failed_trial(tmp_path: Path) -> None:
    tune = {"space": {"train.optimizer.lr": [0.1, 0.001], "data.micro_batch": [4, 1000]}, "sampler": "grid"}
    tiny = Tiny.make(tmp_path, data={**RUN["data"], "eval": "set.arrow"}, tune=tune)
    first = tiny.start("tune", "run.yaml")
    end = time.monotonic() + 120
    record = tiny.folder / "runs/tiny.sweep/sweep.json"
    while not record.exists() or len(json.loads(record.read_bytes())["runs"]) < 2:
        assert time.monotonic() < end
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = tiny.command("tune", "run.yaml", timeout=120)
    assert done.code == 0, done.said
    rows = [line.split() for line in done.out.splitlines() if line.lstrip("* ").startswith("tiny-")]
    table = [[word for word in row if word != "*"] for row in rows if "finished" in row or "failed" in row]
    assert [row[:5] for row in table if len(row) == 7] == [
        ["tiny-0", "4", "0.1", "0", "finished"], ["tiny-1", "4", "0.001", "0", "finished"],
        ["tiny-2", "1000", "0.1", "0", "failed"], ["tiny-3", "1000", "0.001", "0", "failed"],
    ], done.out  # fmt: skip
    assert "4 trials: 2 finished, 0 stopped early, 2 failed" in done.out
    assert "tiny-2 failed:" in done.out
    assert "64 samples" in done.out
    assert "best: tiny-0, loss" in done.out
    for number in (0, 1):
        starts = [r for r in RunDir(tmp_path / f"runs/tiny-{number}").read_attempts() if r["event"] == "start"]
        assert len(starts) == 1, "no trial is repeated"
    best = load_run_file(tmp_path / "runs/tiny.sweep/best.yaml", files=True)
    assert (best.name, best.run_dir, best.train and best.train.optimizer.lr) == ("tiny", None, 0.1)
    assert best.tune is None
    refused = tiny.command("tune", "run.yaml", "seed=3")
    assert refused.code == 2
    assert "is the record of another search: the run file's other keys differ" in refused.err
    refused = tiny.command("tune", "run.yaml", "name=other", "tune.space={train.optimizer.rate: [1]}")
    assert refused.code == 2
    assert "train.optimizer" in refused.err
    assert not (tmp_path / "runs/other.sweep").exists()
    refused = tiny.command("tune", "run.yaml", "-o", "none/best.yaml")
    assert refused.code == 2
    assert "--output: there is no folder" in refused.err
    (tmp_path / "runs/tiny.sweep/tune.journal").unlink()
    refused = tiny.command("tune", "run.yaml")
    assert refused.code == 2
    assert "is the record of a sweep of `ortflow submit --set`" in refused.err
    refused = tiny.command("tune", "run.yaml", "tune=null")
    assert refused.code == 2
    assert "has no section tune" in refused.err
