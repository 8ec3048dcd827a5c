"""The memory of a program with all that it has started, and what status and reports show of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_profile import records
from waits import wait_until

from ortflow.cli.status import describe
from ortflow.launchers.report.mfu import mfu_curve
from ortflow.launchers.report.profile import of_records
from ortflow.launchers.report.profile_section import memory_section
from ortflow.launchers.report.rank_records import read_ranks
from ortflow.launchers.status import read_status
from ortflow.workflow.device.nvml import Nvml
from ortflow.workflow.program.usage import ProgramUsage, descendants, resident_of
from ortflow.workflow.run.rundir import RunDir, append_json_line

HELD = 40 << 20
TREE = f"""
import subprocess, sys, threading, time
program = "held = b'x' * {HELD}; print('holds', flush=True); import time; time.sleep(60)"
def start():
    subprocess.run([sys.executable, "-c", program])
threading.Thread(target=start, daemon=True).start()  # a child of a thread
time.sleep(60)
"""


class Library:
    """NVML with one GPU that two processes use; of one the driver knows no size."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def nvmlDeviceGetCount_v2(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, place: Any) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:  # noqa: N802
        count._obj.value = 3
        for place, (pid, size) in enumerate(((self.pid, 5 << 20), (1, 7 << 20), (self.pid, 2**64 - 1))):
            found[place].pid, found[place].memory = pid, size
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_program_is_measured_with_what_it_has_started() -> None:
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"holds\n"
        family = descendants(program.pid)
        assert len(family) == 2
        assert os.getpid() not in family
        usage = ProgramUsage(program.pid, Nvml(Library(program.pid)))
        first = usage.measure()
        assert first["peak"] >= first["resident"] > HELD
        assert (first["gpu_used"], first["gpu_peak"]) == (5 << 20, 5 << 20)
        (child,) = family - {program.pid}
        os.kill(child, 9)
        # Measured while it still lives, it may hold more than at first.
        wait_until(lambda: not resident_of(child))
        later = usage.measure()
        assert later["resident"] < first["resident"] - HELD / 2
        assert later["peak"] == first["peak"]
        program.kill()
    assert usage.measure() == {}


def test_status_and_report_show_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.record_attempt(event="start", attempt=0, world_size=1)
    for resident in (2_000_000_000, 1_000_000_000):  # of a program that logs no steps
        sizes = {"resident": resident, "peak": 2_500_000_000, "gpu_used": 5_000_000_000, "gpu_peak": 6_000_000_000}
        append_json_line(run.events(0), {"event": "usage", "time": 1.0, "attempt": 0, "rank": 0, "step": 0, **sizes})
    status = read_status(run, alive=True)
    assert dict(describe(status, 0.0))["memory"] == "rank 0: 1.0 GB, at most 2.5 GB; 5.0 GB, at most 6.0 GB of the GPU"
    assert status.to_json()["memory"]["resident"] == 1_000_000_000
    assert dict(describe(read_status(run, alive=False), 0.0))["memory"] == (
        "rank 0: at most 2.5 GB; at most 6.0 GB of the GPU"
    )
    ranks = read_ranks(run, 1, [0], 0)
    assert ranks.memory()[0]["resident"] == 2_000_000_000
    assert "GPU memory" in memory_section(ranks)


def test_the_mfu_of_every_step_follows_from_one_window(tmp_path: Path) -> None:
    profile = of_records(tmp_path, records())  # steps 5 and 6, 4e8 operations each, 1e10 a second on each of 2 ranks
    events: list[dict[str, Any]] = [{"event": "attempt_start", "attempt": 0, "world_size": 2}]
    for step, (samples, seconds) in enumerate(((8, 0.2), (8, 0.1), (4, 0.1)), 4):
        events.append({"event": "step", "attempt": 0, "step": step, "samples": samples, "seconds": seconds})
    events.append({"event": "attempt_start", "attempt": 1, "world_size": 1})
    events.append({"event": "step", "attempt": 1, "step": 7, "samples": 6, "seconds": 0.1})
    events.append({"event": "step", "attempt": 1, "step": 8, "samples": 6})
    work = 4e8 / 6  # operations of a sample: 8 and 4 in the window
    expected = [100 * work * n / s / (1e10 * r) for n, s, r in ((8, 0.2, 2), (8, 0.1, 2), (4, 0.1, 2), (6, 0.1, 1))]
    assert mfu_curve(events, profile) == [(step, pytest.approx(value)) for step, value in enumerate(expected, 4)]
    assert mfu_curve(events, None) == []
    assert mfu_curve(events[:1], profile) == []


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", "print('ends')"], stdout=subprocess.PIPE) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists(), "nobody has waited for it"
        assert ProgramUsage(child.pid).measure() == {}
