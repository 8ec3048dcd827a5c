"""The program as a child of the rank's process: started, asked to stop, killed with all that it has started.

The rank's process adopts orphans below it (PR_SET_CHILD_SUBREAPER), so that processes which the program leaves behind
are found, also if they have left its process group. Linux; elsewhere only the process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from ortflow.workflow.errors import UserError

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MARK = "ORTFLOW_PROGRAM_MARK"
"""Environment variable by which everything that a program has started is known, whatever its process group."""
HELPERS = 0.5
"""Seconds that helpers of a program, such as the trackers of `multiprocessing`, have to end after it."""


own_processes: set[int] = set()
"""Processes of the rank's process that are no part of the program: neither they nor what they start are left-overs."""


def adopt_orphans() -> None:
    """Let the kernel give this process the orphans below it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """A started program.

    Parameters
    ----------
    command
        Executable and arguments.
    cwd
        The folder that it starts in.
    environment
        Its complete environment.

    Raises
    ------
    UserError
        If it cannot be started.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        adopt_orphans()
        mark = f"{MARK}={secrets.token_hex(16)}"
        # MPICH's mpirun, and srun with pmi2, name a rank's connection to them by its number; Popen would close it.
        passed = [int(environment["PMI_FD"])] if environment.get("PMI_FD", "").isdigit() else []
        try:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**environment, MARK: mark.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                preexec_fn=_before_exec(),
                # The program's children are in its session, and so are apart from the ranks'.
                start_new_session=True,
            )
        except OSError as error:
            sentence = f"{command[0]} cannot be started: {error.strerror}"
            raise UserError(sentence, where="program", fix="correct the path, or make the file executable") from error
        except ValueError as error:
            raise UserError(f"{command[0]} cannot be started: {error}", where="program") from error
        self.pid = self._process.pid
        self._guard = _guard(self.pid, mark)

    def poll(self) -> int | None:
        """Its exit code, minus the signal if one ended it; None while it runs."""
        if self._process.returncode is None:
            self._reap_orphans()
        return self._process.poll()

    def _reap_orphans(self) -> None:
        """Collect ended processes that were adopted; never the program itself, whose status is `poll`'s."""
        if not hasattr(os, "waitid"):
            return
        while True:
            try:
                # WNOWAIT only looks: if the program itself were collected here, subprocess.Popen would report exit code
                # 0.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in {0, self.pid, *own_processes}:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

    def ask(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the program itself, not to its children."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and everything that it has started."""
        self._kill_all()
        self._guard.kill()
        self._guard.communicate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def end_leftovers(self) -> int:
        """After its end: kill what it has left behind; returns the number of such processes."""
        end = time.monotonic() + HELPERS
        while (leftovers := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.02)
        self._kill_all()
        return len(leftovers)

    def _leftovers(self) -> list[psutil.Process]:
        """Living processes that the program has started, if it has ended."""
        processes = []
        for process in _descendants({self._guard.pid, *own_processes}):
            with contextlib.suppress(psutil.Error):
                if process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
                elif process.pid != self.pid:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        return processes

    def _kill_all(self) -> None:
        # A process may start another while the others are killed.
        for _ in range(100):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            leftovers = self._leftovers()
            running = self._process.poll() is None
            if not leftovers and not running:
                return
            for process in leftovers:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)


def _descendants(spared: set[int]) -> list[psutil.Process]:
    """All processes below this one, without `spared` and those below them."""
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.pid not in spared:
                processes.append(child)
                with contextlib.suppress(psutil.Error):
                    processes += child.children(recursive=True)
    return processes


def _guard(group: int, mark: str) -> subprocess.Popen[bytes]:
    """A shell that kills what the program has started when this process is gone, whatever ended it.

    It waits for the end of its input, which this process holds open.
    """
    # The kernel kills only the program itself then, not its children, and gives them to another process, so that those
    # with a session of their own are known only by their environment, which children inherit (Linux's /proc; elsewhere
    # they stay).
    script = f"""trap '' TERM INT HUP QUIT USR1 USR2; read _; kill -9 -- -{group} 2>/dev/null
for again in 1 2 3; do
  for file in /proc/[0-9]*/environ; do
    grep -qsF {mark} "$file" && file=${{file%/environ}} && kill -9 "${{file#/proc/}}" 2>/dev/null
  done
done"""
    # In a session of its own: a process manager kills the rank's with it.
    return subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin"}, cwd="/", start_new_session=True,
    )  # fmt: skip


def _before_exec() -> Callable[[], None]:
    """Between fork and exec: the kernel kills the program when the rank's process dies, and signals have their default
    handlers.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_exec() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # The parent may have died before the call above, which then has no death to report.
            if os.getppid() != parent:
                os._exit(1)

    return before_exec
