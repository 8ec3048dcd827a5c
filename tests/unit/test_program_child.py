"""Everything that a program has started ends with the rank's process, also if that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waits import PATIENCE, wait_until

PROGRAM = """
import os, subprocess, sys
grouped = subprocess.Popen(["sleep", "300"])
apart = subprocess.Popen(["sleep", "300"], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(f"{grouped.pid} {apart.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
apart.wait()
"""
RANK = """
import os, sys, time
from pathlib import Path
from ortflow.workflow.program.child import Child
child = Child([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path("/"), os.environ)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are known by /proc")
def test_a_killed_rank_leaves_no_process_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", RANK, PROGRAM, str(pids)]) as rank:
        wait_until(pids.exists)
        processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        assert len(processes) == 2
        rank.kill()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE)
    assert left == []
