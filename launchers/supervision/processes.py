"""Processes of a run on this machine: finds its ranks, and ends them all.

A rank is identified by its environment: the process manager sets its rank there, and the launcher the run directory.
A rank's children inherit both, so in a process tree only the topmost one is the rank. Must not touch a process
that does not carry the run directory in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from ortflow.workflow.ranks import Place

PR_SET_PDEATHSIG = 1


def dies_with_parent() -> Callable[[], None]:
    """For a child before exec: the kernel kills it when this process dies. Linux; nothing elsewhere."""
    if sys.platform != "linux":
        return lambda: None
    else:
        # Looked up before the fork: behind it, another thread's lock on the loader would stay held for ever.
        parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

        def before_exec() -> None:
            # Also when the thread that has started the child ends: that is its parent here (prctl(2)).
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # A parent that has died before that call sends no signal any more (prctl(2)).
            if os.getppid() != parent:
                os._exit(1)

        return before_exec


def family(root: psutil.Process) -> list[psutil.Process]:
    """The process and all its descendants; empty if it is gone."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def ranks_among(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """The ranks of a process tree that is listed parents first."""
    ranks: dict[int, psutil.Process] = {}
    inside: set[int] = set()
    for process in processes:
        try:
            if process.ppid() in inside:
                inside.add(process.pid)
                continue
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        place = Place.from_environment(environment)
        if place.manager != "none":
            ranks[place.rank] = process
            inside.add(process.pid)
    return ranks


def of_run(run_dir: Path) -> list[psutil.Process]:
    """Every process of this user, except this one, that was started for the run directory."""
    own_ids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    members = []
    for process in psutil.process_iter():
        if process.pid in own_ids:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("ORTFLOW_RUN_DIR") == str(run_dir):
                members.append(process)
    return members


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def runs(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill(processes: Iterable[psutil.Process], seconds: float = 5.0) -> None:
    """Kill, and wait until they are gone. Must not be used for our own children: their exit status would be lost."""
    processes = list(processes)
    send(processes, signal.SIGKILL)
    end = time.monotonic() + seconds
    while any(runs(process) for process in processes) and time.monotonic() < end:
        time.sleep(0.01)
