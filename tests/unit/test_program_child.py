"""Everything that a program has started ends with it, and with the rank's process, also if that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


SCENARIO = """
import json, os, subprocess, sys, time
from pathlib import Path
import psutil
from ortflow.workflow.program import child as program_child
from ortflow.workflow.program.child import Child
PATIENCE = float(sys.argv[4])
child = Child([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path("/"), os.environ)
def wait(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
wait(lambda: os.path.exists(sys.argv[2]))
started = [psutil.Process(int(pid)) for pid in Path(sys.argv[2]).read_text().split()]
own = subprocess.Popen(["sleep", "300"])
program_child.own_processes.add(own.pid)
def run(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
result = {}
exec(sys.argv[3])
wait(lambda: not any(map(run, started)))
result["own runs"] = own.poll() is None
own.kill()
print(json.dumps(result))
"""
"""A rank's process of its own: the program's left-overs are looked for among all that it has started."""
ENDS = PROGRAM.replace("apart.wait()\n", "")


def outcome_of(program: str, steps: str, folder: Path) -> dict[str, Any]:
    """What `steps` note in `result`; all that the program has started ended then."""
    done = subprocess.run(
        [sys.executable, "-c", SCENARIO, program, str(folder / "pids"), steps, str(PATIENCE)],
        capture_output=True, text=True, timeout=3 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the rank's process")
def test_what_a_program_leaves_behind_is_counted_and_killed(tmp_path: Path) -> None:
    steps = """
wait(lambda: child.poll() is not None)
result["code"], result["run"] = child.poll(), sum(map(run, started))
result["leftovers"], result["again"] = child.end_leftovers(), child.end_leftovers()
"""
    found = outcome_of(ENDS, steps, tmp_path)
    assert found == {"code": 0, "run": 2, "leftovers": 2, "again": 0, "own runs": True}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the rank's process")
def test_helpers_that_end_soon_after_the_program_are_no_leftovers(tmp_path: Path) -> None:
    steps = """
import threading
program_child.HELPERS = PATIENCE
wait(lambda: child.poll() is not None)
threading.Timer(0.2, lambda: [process.terminate() for process in started]).start()
result["leftovers"] = child.end_leftovers()
"""
    assert outcome_of(ENDS, steps, tmp_path) == {"leftovers": 0, "own runs": True}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the rank's process")
def test_a_program_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    steps = """
result["before"] = child.poll()
child.kill()
result["code"] = child.poll()
"""
    assert outcome_of(PROGRAM, steps, tmp_path) == {"before": None, "code": -9, "own runs": True}
