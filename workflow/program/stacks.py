"""Writes the stacks of a program that does not move to its rank's log, where the launcher reads them.

By py-spy, if it is installed beside the rank or on the PATH, and may read the program's memory: it needs nothing of the
program, and works in native code. Otherwise by a signal for which the program's library has registered faulthandler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from ortflow.workflow.program.child import own_processes
from ortflow.workflow.program.serve import Client
from ortflow.workflow.run.hang import PROGRAM_STACKS
from ortflow.workflow.system.threads import start_or_call

SECONDS = 15.0
"""Longest time of py-spy. It waits for a program that is stopped."""
WRITING = 1.0
"""Seconds in which faulthandler writes."""


def write_stacks(logs: Callable[[int], Path], rank: int, clients: Sequence[Client], child: int) -> Thread | None:
    """Begin to write the stacks of the programs of a rank's process; returns what does it.

    Parameters
    ----------
    logs
        The log of a rank.
    rank
        The rank of this process.
    clients
        The libraries that have connected: several if another launcher has started the node's programs.
    child
        The process that was started, which is the program if no library has connected.
    """
    programs = [(logs(client.rank or 0), client.pid or 0, client.signal) for client in clients]

    def write() -> None:
        for log, pid, number in programs or [(logs(rank), child, None)]:
            # Several programs share standard error: faulthandler's lines would be in the log of another rank.
            _write(log, pid, number if len(programs) == 1 else None)

    return start_or_call("stacks", write)


def _write(log: Path, pid: int, number: int | None) -> None:
    tool = py_spy()
    text = _dumped(tool, pid) if tool is not None else None
    if text is None and (number is None or not catches(pid, number)):
        return
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"{PROGRAM_STACKS}\n{text or ''}\n".encode())
        if text is None and number is not None:
            os.kill(pid, number)
            time.sleep(WRITING)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal: without one, the signal would end it.

    A program in a container with its own process numbers reports one that belongs to another process here, and a
    program that has replaced itself (`exec`) has lost its handlers.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def py_spy() -> str | None:
    """The path of py-spy; None if it is not installed."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return shutil.which("py-spy", path=os.pathsep.join(places))


def _dumped(tool: str, pid: int) -> str | None:
    """What py-spy says of a process; None if it may not read it, or does not answer."""
    command = [tool, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            errors="replace",
        ) as process:  # fmt: skip
            own_processes.add(process.pid)
            try:
                out, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
    except OSError:
        return None
    return out if process.returncode == 0 and out.strip() else None
