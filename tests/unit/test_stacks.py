"""Stacks of ranks that hang: written by a real process, read back, and put into a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waits import PATIENCE

from ortflow.launchers.attempts.stacks import Frame, stack_in, stacks_of, waited_for, where
from ortflow.workflow.run.hang import PROGRAM_STACKS
from ortflow.workflow.run.rundir import RunDir

HANGING = """
import os, sys, threading, time
from ortflow.workflow.run.hang import HangWatch
from ortflow.workflow.run.signals import StopFlag

def turns_in_circles(before):  # until all is written: for a second, nothing more
    size, changed, begun = 0, 0.0, time.monotonic()
    while not size or time.monotonic() - changed < 1:
        assert time.monotonic() - begun < 100
        if os.fstat(2).st_size - before != size:
            size, changed = os.fstat(2).st_size - before, time.monotonic()

stop = StopFlag()
stop.watch_for_hangs(HangWatch(1.0))
threading.Thread(target=time.sleep, args=(4,), daemon=True).start()
moves, begun = 0, time.monotonic()
while moves < 20:  # for longer than the limit
    last, begun = begun, time.monotonic()
    stop.reason
    moves += 1
    if time.monotonic() - last > 0.3:  # a busy machine holds it up
        print("held up", file=sys.stderr, flush=True)
        moves = 0
    time.sleep(0.1)
print("moved", file=sys.stderr, flush=True)
turns_in_circles(os.fstat(2).st_size)
"""


def test_a_process_that_hangs_writes_where(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = run.log(0, 0)
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", HANGING], stderr=file, check=True, timeout=PATIENCE)
    text = log.read_text().rpartition("held up\n")[2]
    assert text.index("moved") < text.index("Timeout")
    stacks = stacks_of(run, 0, 2)
    assert stacks[1] is None
    assert stacks[0] is not None
    assert stacks[0][0].function == "turns_in_circles"
    assert (
        where(stacks) == f"rank 0 is in turns_in_circles (<string>, line {stacks[0][0].line}); rank 1 does not respond"
    )


def test_a_rank_that_hangs_before_its_first_check_writes_too(tmp_path: Path) -> None:
    program = HANGING.partition("threading.Thread")[0].replace("HangWatch(1.0)", "HangWatch(0.5)")
    with (tmp_path / "log").open("wb") as file:
        command = [sys.executable, "-c", f"{program}turns_in_circles(0)"]
        subprocess.run(command, stderr=file, check=True, timeout=PATIENCE)
    stack = stack_in((tmp_path / "log").read_text())
    assert stack is not None
    assert stack[0].function == "turns_in_circles"


def test_where_the_ranks_are() -> None:
    def waits(call: str) -> tuple[Frame, ...]:
        below = Frame("/env/ortflow/workflow/comm/mpi.py", 9, "_poll")
        return (below, Frame("/env/ortflow/workflow/comm/mpi.py", 5, call), Frame("/env/ortflow/workflow/x.py", 1, "f"))

    reads = (Frame("/home/me/data.py", 7, "read"), *waits("all_reduce"))
    everywhere = dict.fromkeys(range(6), waits("all_reduce")) | {6: waits("barrier"), 7: reads}
    assert where(everywhere) == (
        "ranks 0, 1, 2, 3 and 2 more wait for other ranks in all_reduce; rank 6 waits for other ranks in barrier; "
        "rank 7 is in read (/home/me/data.py, line 7)"
    )
    assert (
        where({0: waits("send"), 1: None, 2: None})
        == "rank 0 waits for other ranks in send; ranks 1 and 2 do not respond"
    )
    assert where({0: None, 1: None}) == ""


def test_the_newest_stack_counts() -> None:
    first = 'Timeout (0:00:10.500000)!\nThread 0x01 (most recent call first):\n  File "a.py", line 1 in f\n'
    second = 'Timeout (0:20:00)!\nThread 0x01 (most recent call first):\n  File "b.py", line 2 in g\n'
    assert stack_in(first + "step 2\n" + second) == (Frame("b.py", 2, "g"),)
    assert stack_in("Timeout (0:20:00)!\n") is None
    assert stack_in("step 1\n") is None
    named = 'Timeout (0:20:00)!\nThread 0x01 [worker] (most recent call first):\n  File "b.py", line 2 in g\n'
    assert stack_in(named) == (Frame("b.py", 2, "g"),)


def test_the_ranks_that_others_wait_for() -> None:
    collective = (Frame("/x/torch/distributed/distributed_c10d.py", 5, "all_reduce"),)
    backward = (Frame("/x/torch/autograd/graph.py", 5, "_engine_run_backward"),)
    reads = (Frame("/home/me/data.py", 7, "read"),)
    assert waited_for({0: collective, 1: reads, 2: None}) == (1, 2)
    assert waited_for({0: backward, 1: reads}) == (1,)
    assert waited_for({0: reads, 1: None}) == ()
    sleeps = (Frame("/env/ortflow/workflow/run/lead.py", 59, "wait_for_lead"),)
    assert waited_for({0: None, 1: sleeps, 2: sleeps}) == (0,), "rank 0 configures the run"
    assert waited_for({0: collective, 1: collective}) == ()
    assert where({0: backward, 1: reads}) == (
        "rank 0 waits for other ranks in backward; rank 1 is in read (/home/me/data.py, line 7)"
    )


def test_what_py_spy_writes_is_read() -> None:
    dump = (
        'Process 7: python t.py\nPython v3.11.7 (/usr/bin/python)\n\nThread 7 (active): "MainThread"\n'
        '    read (data.py:12)\n    <module> (t.py:3)\nThread 9 (idle): "loader"\n    wait (threading.py:1)\n'
    )
    text = f"step 1\n{PROGRAM_STACKS}\n{dump}"
    assert stack_in(text) == (Frame("data.py", 12, "read"), Frame("t.py", 3, "<module>"))
