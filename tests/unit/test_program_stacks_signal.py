"""The signal for the stacks of a program goes only to a process that has a handler of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waits import PATIENCE, wait_until

from ortflow.launchers.attempts.stacks import stack_in
from ortflow.workflow.program import stacks
from ortflow.workflow.program.serve import Client

PROGRAM = """
import os, sys, time
from ortflow.program.stacks import register_stacks
def waits(number):
    print(number, flush=True)
    if sys.argv[1] == "replaced":
        os.execvp("sleep", ["sleep", "60"])
    time.sleep(60)
waits(register_stacks())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are no real-time signals")
def test_a_process_without_a_handler_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container with its own process numbers, whose number is that of another process here."""
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    monkeypatch.setattr(stacks, "WRITING", 0.3)
    alive, read = [], []
    for does in ("waits", "replaced"):
        log = tmp_path / does
        with (
            log.open("ab") as errors,
            socket.socket() as stream,
            subprocess.Popen([sys.executable, "-c", PROGRAM, does], stdout=subprocess.PIPE, stderr=errors) as child,
        ):
            assert child.stdout is not None
            client = Client(stream)
            client.rank, client.pid, client.signal = 0, child.pid, int(child.stdout.readline())
            if does == "replaced":
                command = Path(f"/proc/{child.pid}/comm")
                while command.read_text() != "sleep\n":
                    pass
            thread = stacks.write_stacks(lambda _, log=log: log, 0, [client], child.pid)
            assert thread is not None
            thread.join(PATIENCE)
            if does == "waits":  # faulthandler writes in the program, when that has its turn
                wait_until(lambda log=log: (stack := stack_in(log.read_text())) and stack[0].function == "waits")
            alive.append(child.poll() is None)
            child.kill()
        read.append(stack_in(log.read_text()))
    assert alive == [True, True]
    assert read[0] is not None
    assert read[0][0].function == "waits"
    assert read[1] is None, "nothing is written"
