"""A terminal that is closed, or standard streams that are, end no run: its ranks save, or go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from project import environment
from terminal import Terminal
from tiny_runs import Tiny, has_traceback
from waits import PATIENCE

from ortflow.launchers.records import State
from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir

ORTFLOW = [sys.executable, "-m", "ortflow"]
RUN = ["run", "run.yaml", "train.steps=100000"]


def ended(pid: int) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, 9)
    raise AssertionError("the command does not end")


@pytest.mark.parametrize("output", ["", " >lines"], ids=["live view", "plain lines"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_save_when_the_terminal_is_closed(tmp_path: Path, ranks: int, output: str) -> None:
    tiny = Tiny.make(tmp_path, resources={"ranks_per_node": ranks, "cpus_per_rank": 1})
    terminal = Terminal(["bash", "-c", f"exec {' '.join(ORTFLOW + RUN)}{output}"], tiny.folder, environment())
    terminal.until(lambda: (read_status(RunDir(tiny.run_dir)).step or 0) > 10)
    terminal.close()
    assert ended(terminal.pid) == 75
    status = read_status(RunDir(tiny.run_dir))
    while status.state.active:
        time.sleep(0.1)
        status = read_status(RunDir(tiny.run_dir))
    assert status.state is State.PREEMPTED, status
    assert (status.checkpoint or 0) >= 10
    assert "SIGHUP" in f"{status.why} {status.cause}"


def test_a_run_that_ignores_the_hangup_goes_on(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path, resources={"ranks_per_node": 2, "cpus_per_rank": 1})
    line = f"trap '' HUP; exec {' '.join(ORTFLOW)} run run.yaml train.steps=400 checkpoint.every_steps=50"
    terminal = Terminal(["bash", "-c", line], tiny.folder, environment())
    terminal.until(lambda: (read_status(RunDir(tiny.run_dir)).step or 0) > 10)
    terminal.close()
    assert (read_status(RunDir(tiny.run_dir)).step or 0) < 400, "it ended before its terminal was closed"
    assert ended(terminal.pid) == 0
    assert read_status(RunDir(tiny.run_dir)).state is State.FINISHED


def test_other_commands_end_with_their_terminal(tmp_path: Path) -> None:
    """Even if the signal was lost: nobody reads what they print."""
    read, write = os.openpty()
    program = (
        "import sys, time\nfrom ortflow.workflow.system.streams import guarded\nwith guarded():\n"
        "    while True: print('line', flush=True); time.sleep(0.05)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=write, stdin=subprocess.DEVNULL) as child:
        os.close(write)
        os.read(read, 10)
        os.close(read)
        assert child.wait(PATIENCE) == -1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    tiny = Tiny.make(tmp_path)
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(ORTFLOW)} run run.yaml {closed}"], cwd=tiny.folder, env=environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, has_traceback(done.stderr)) == (0, False), done.stderr
    assert read_status(RunDir(tiny.run_dir)).state is State.FINISHED
