"""Clients whose clock is ahead, on this machine: a live run directory keeps its launcher."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Bench

FAULTS = Path(__file__).parent.parent / "support" / "faults"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench.make(tmp_path)
    made.write(1)
    yield made
    made.close()


def clock_ahead(seconds: float) -> str:
    """Shell commands that set the clock of `ortflow` ahead."""
    return f'export PYTHONPATH={shlex.quote(str(FAULTS))} SKEW="ortflow {seconds}"; exec '


@pytest.mark.rotates
@pytest.mark.parametrize("ahead", [300.0, 7200.0, -7200.0])
def test_a_client_with_another_clock_does_not_take_a_live_run(bench: Bench, ahead: float) -> None:
    running = bench.start("run", "run.yaml", steps=100_000, pause=0.05)
    running.until_step(1)
    before = (bench.run_dir / "attempts.jsonl").read_bytes()
    for verb in (("run", "run.yaml"), ("resume", "fake"), ("run", "run.yaml", "--fresh")):
        second = bench.run(*verb, shell=clock_ahead(ahead))
        assert second.code == 2, verb
        assert f"is in use by process {running.process.pid} on" in second.err
        assert second.err.count("\n") == 1
    looked = bench.run("status", "--json", shell=clock_ahead(ahead))
    assert json.loads(looked.out)["state"] == "running"
    assert (bench.run_dir / "attempts.jsonl").read_bytes() == before
    assert bench.run("cancel", "fake", shell=clock_ahead(ahead)).code == 0
    assert running.wait().code == 75
    assert [end["outcome"] for end in bench.attempts("end")] == ["preempted"]
    assert bench.run("resume", "fake", shell=clock_ahead(ahead), steps=3).code == 0
    submitted = bench.attempts("submit")[-1]["time"]
    assert abs(submitted - time.time() - ahead) < 120, "the clock was not ahead"
