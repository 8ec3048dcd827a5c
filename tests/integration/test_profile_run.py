"""A run with a profile that is killed twice within its window, on a disk that is full once: nothing but the profile
suffers. Its trace, its table, and a run that ends before its window."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from project import of_kind
from tiny_runs import Tiny, has_traceback, is_root, result
from waits import PATIENCE

from ortflow.launchers.supervision.processes import family, ranks_among
from ortflow.workflow.run.profile_records import LANES, records
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir

FAULTS = Path(__file__).parents[1] / "support" / "faults"
SECTIONS: dict[str, Any] = {
    "train": {"steps": 40, "optimizer": {"name": "adamw", "lr": 1e-2}, "evaluation": {"every_steps": 30}},
    "data": {"train": "set.arrow", "eval": "set.arrow", "micro_batch": 4},
    "checkpoint": {"every_steps": 1},
    "resources": {"ranks_per_node": 2, "cpus_per_rank": 1},
    "restart": {"failures": 2, "backoff": {"first": 0.1, "limit": 0.1}},
}


def test_a_profile_changes_no_run(tmp_path: Path) -> None:
    calm = Tiny.make(tmp_path / "calm", **SECTIONS, monitor={"profile": {"from": 100, "to": 109}})
    ended = calm.command("run", "run.yaml", timeout=120)
    assert ended.code == 0, ended.said
    (warning,) = [each["message"] for each in of_kind(calm.run_dir, "warning")]
    assert warning == "monitor.profile.from is 100, and the run has 40 steps: nothing is recorded"
    assert not (calm.run_dir / "profile").exists()
    none = calm.command("profile", "tiny")
    assert none.code == 2
    assert "tiny has no profile yet" in none.err

    tiny = Tiny.make(tmp_path / "project", **SECTIONS, monitor={"profile": {"from": 5, "to": 32}})
    launcher = tiny.start("run", "run.yaml", PYTHONPATH=str(FAULTS), SLOW="0.15 2")
    full = tiny.run_dir / "profile" / "attempt-01"
    mounted = False
    try:
        for kill, step in enumerate((8, 14)):
            wait_for(tiny.run_dir, step, attempt=kill)
            if kill == 0 and is_root():
                full.mkdir(parents=True)
                small = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(full)]
                mounted = subprocess.run(small, check=False).returncode == 0
            ranks_among(family(psutil.Process(launcher.pid)))[kill].kill()
        out, err = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, out + err
        assert not has_traceback(out + err)
        if mounted:
            said = [each["message"] for each in of_kind(tiny.run_dir, "warning") if each["attempt"] == 1]
            assert any("No space left on device" in message for message in said), said
    finally:
        if mounted:
            subprocess.run(["umount", str(full)], check=True)
    assert result(tiny.run_dir) == result(calm.run_dir)

    # What a checkpoint has behind it is in TensorBoard's file, although scalars wait for a second to be written.
    if importlib.util.find_spec("tensorboard") is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        scalars = EventAccumulator(str(tiny.run_dir / "tensorboard"), size_guidance={"scalars": 0})
        scalars.Reload()
        assert [event.step for event in scalars.Scalars("loss")] == [*range(1, 41)]

    # The third attempt resumed in the middle of the window.
    (resumed,) = [each["step"] for each in of_kind(tiny.run_dir, "resume") if each["attempt"] == 2]
    (event,) = of_kind(tiny.run_dir, "profile")
    assert event["step"] == 32
    found = records(tiny.run_dir / "profile" / "attempt-02")
    assert [lines[0]["first"] for lines in found.values()] == [resumed + 1] * 2
    events = check_trace(Path(event["path"]), ranks=2)
    steps = {event["name"] for event in events if event.get("cat") == "steps"}
    assert steps == {f"step {step}" for step in range(resumed + 1, 33)}
    modules = {each["args"].get("module") for each in events}
    assert {"in", "norm", "relu", "out"} <= modules

    printed = tiny.command("profile", "tiny")
    assert printed.code == 0, printed.said
    assert printed.out.startswith(f"steps {resumed + 1} to 32 of 2 ranks: ")
    numbers = json.loads(tiny.command("profile", "tiny", "--json").out)
    assert numbers["complete"]
    assert sum(row["seconds"] for row in numbers["operators"]) == pytest.approx(numbers["seconds"], rel=0.02)
    assert numbers["limits"]["flops"] > 1e8
    assert {"all_reduce", "data wait", "evaluation"} <= {row["name"] for row in numbers["operators"]}

    # What the ranks of the first attempt did before one was killed.
    partial = check_trace(tiny.run_dir / "profile" / "attempt-00.json.gz", ranks=2)
    assert {f"step {step}" for step in range(5, 8)} <= {event["name"] for event in partial}


def check_trace(path: Path, ranks: int) -> list[dict[str, Any]]:
    """The events of a trace, whose form is the Trace Event Format's (Chrome, Perfetto)."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert trace["displayTimeUnit"] == "ms"
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names = {}
    for event in trace["traceEvents"]:
        assert {type(event[key]) for key in ("pid", "tid")} == {int}
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            names[event["pid"], event["tid"], event["name"]] = event["args"]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert {pid for pid, _ in lanes} == {*range(ranks)}
    for (pid, tid), spans in lanes.items():
        assert names[pid, tid, "thread_name"] == {"name": LANES[tid]}
        # A lane shows spans that follow each other or lie within each other.
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (_, end), (start, later) in pairwise(spans):
            assert start >= end - 5 or later <= end + 5, (pid, tid, start, end, later)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def wait_for(run_dir: Path, step: int, attempt: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = read_records(RunDir(run_dir).events(0), EVENTS)[0]
        done = [each["step"] for each in found if each["event"] == "step" and each["attempt"] == attempt]
        if done and max(done) >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} of attempt {attempt} is not reached")
