"""A program of two ranks in which one never comes to the sum that the other waits for: the cause names both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")

from messages import mentions
from program_runs import Programs

from ortflow.launchers.attempts.stacks import Frame, stack_in
from ortflow.workflow.program.stacks import py_spy, write_stacks

PROGRAM = """
import os, time
import torch; print("imported", flush=True)
import ortflow.program
torch.distributed.init_process_group("gloo")
print("connected", flush=True)
run = ortflow.program.context()

def reads_a_lost_file():
    while True:
        time.sleep(0.05)

def main():
    print("begins", flush=True)
    if os.environ["RANK"] == "1":
        reads_a_lost_file()
    torch.distributed.all_reduce(torch.ones(1))

main()
"""


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: train\nprogram: {script: train.py, cwd: .}\nresources: {ranks_per_node: 2, cpus_per_rank: 1}\n"
        "restart: {failures: 0, hung_seconds: 14}\n"
    )
    programs = Programs(tmp_path)
    programs.write(PROGRAM)
    code, said = programs.run("run.yaml")
    assert code == 1
    assert mentions(
        said, "the ranks hung: no heartbeat for 14 s", "rank 0 waits for other ranks in all_reduce",
        "rank 1 is in reads_a_lost_file (", "train.py, line 11: time.sleep(0.05))",
    ), said  # fmt: skip
    assert "The program does not move; its stacks:" in programs.log(1)


@pytest.mark.skipif(py_spy() is None, reason="py-spy is not installed")
def test_py_spy_reads_a_process_that_knows_nothing_of_ortflow(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("import time\ndef turns():\n    while True: time.sleep(0.01)\nprint(1, flush=True)\nturns()\n")
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        thread = write_stacks(lambda rank: log, 0, [], child.pid)
        assert thread is not None
        thread.join(30)
        child.kill()
    assert stack_in(log.read_text()) == (Frame(str(script), 3, "turns"), Frame(str(script), 5, "<module>"))
