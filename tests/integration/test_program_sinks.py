"""A run with sinks: their process is killed, hangs, or outlives nothing; the run itself is the same."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from program_runs import Programs
from waits import wait_until

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

SINKS = 'monitor.sinks=[{"kind": "prometheus", "file": "metrics.prom"}]'


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def sinks_of(folder: Path) -> list[psutil.Process]:
    """Processes that serve sinks of runs in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "ortflow.workflow.sinks" in command and any(str(folder) in word for word in command):
            found.append(process)
    return found


def test_sinks_of_a_program(programs: Programs) -> None:
    programs.write(
        """
        import ortflow.program, time
        run = ortflow.program.context()
        for step in range(1, 31):
            run.log(step=step, loss=1 / step)
            time.sleep(0.02)
        """
    )
    code, output = programs.run("train.py", SINKS)
    assert code == 0, output
    text = (programs.folder / "runs/train/metrics.prom").read_text()
    assert 'ortflow_step{attempt="0",run="train"} 30.0' in text
    assert 'ortflow_state{attempt="0",run="train",state="finished"} 1.0' in text
    assert sinks_of(programs.folder) == []


def test_their_process_is_killed(programs: Programs) -> None:
    programs.write(
        """
        import os, signal, time
        import psutil, ortflow.program
        run = ortflow.program.context()
        sinks = []
        while not sinks:
            sinks = [p for p in psutil.Process(os.getppid()).children() if "ortflow.workflow.sinks" in p.cmdline()]
        for step in range(1, 11):
            run.log(step=step, loss=1 / step)
            if step == 5:
                sinks[0].kill()
        """
    )
    code, output = programs.run("train.py", SINKS)
    assert code == 0, output
    assert [event["step"] for event in programs.events("step")] == list(range(1, 11))
    (warning,) = [event["message"] for event in programs.events("warning")]
    assert "monitor.sinks ended with exit code -9" in warning


def test_a_killed_rank_leaves_no_process(programs: Programs) -> None:
    programs.write(
        """
        import os, signal, time
        import ortflow.program
        run = ortflow.program.context()
        run.log(step=1, loss=1.0)
        while not os.path.exists(os.environ["ORTFLOW_RUN_DIR"] + "/metrics.prom"):  # their process has begun
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    code, output = programs.run("train.py", SINKS, "restart.failures=0")
    assert code == 1, output
    wait_until(lambda: not sinks_of(programs.folder))
    assert 'state="failed"} 1.0' in (programs.folder / "runs/train/metrics.prom").read_text()
