"""One attempt on this machine: mpirun (or the only rank) as a child process, and the ranks below it.

Used only by the supervisor. Ranks write their own logs; the output of mpirun goes to launcher.log. The child leads its
own session, so that Ctrl-C in the terminal reaches only the launcher, and is killed when the launcher dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ortflow.launchers.attempts.cause import Cause, statuses
from ortflow.launchers.attempts.mpi_abort import LOG_BYTES, ended_by_mpi
from ortflow.launchers.attempts.tail import last_bytes, newest
from ortflow.launchers.start_folder import ROOT
from ortflow.launchers.supervision import processes
from ortflow.launchers.supervision.exits import Exits
from ortflow.manifests.local import MpiKind
from ortflow.workflow.comm import daemon_files
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import open_regular

POLL_PERIOD = 0.25
"""Seconds between two searches for unknown ranks: each one reads the whole process table."""
OUTPUT_BYTES = 1 << 20
"""How much of the end of mpirun's output is searched."""
UNSEEN = 10.0
"""Seconds after which a rank that was never found counts as ended."""


@dataclass(frozen=True)
class RankCommand:
    """What starts the ranks of an attempt."""

    run: RunDir
    number: int
    """Of the attempt."""
    argv: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """The child process that starts the ranks of an attempt: mpirun, srun, or the only rank."""

    def __init__(self, command: RankCommand) -> None:
        self.run, self.number = command.run, command.number
        self._child = start_child(command)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def poll(self) -> int | None:
        """Its exit code (minus the signal if one ended it); None while it runs."""
        return self._child.poll()

    def guess(self, returncode: int) -> Cause | None:
        """The probable cause if neither ranks nor exit statuses give one."""
        return ended_by_mpi(returncode, (), self.ends_of_logs())

    def ends_of_logs(self) -> dict[int, str]:
        """The end of each rank's log, by rank."""
        logs = self.run.log(self.number, 0).parent.glob("rank-*.log")
        return {
            int(log.stem.removeprefix("rank-")): last_bytes(log, LOG_BYTES).decode(errors="replace") for log in logs
        }

    def output(self) -> str:
        """The end of its output."""
        return last_bytes(self.run.launcher_log(self.number), OUTPUT_BYTES).decode(errors="replace")


class Attempt(Child):
    """A started attempt; `poll` must be called often."""

    def __init__(self, command: RankCommand, world_size: int, mpi: MpiKind | None) -> None:
        self.world_size, self.mpi = world_size, mpi
        self.ranks: dict[int, psutil.Process] = {}
        """Ranks found so far."""
        self._family: dict[int, psutil.Process] = {}
        self._started = time.monotonic()
        self._next_check = 0.0
        logs = command.run.launcher_log(command.number).parent
        logs.mkdir(parents=True, exist_ok=True)
        self._exits = Exits(logs)
        super().__init__(command)

    def poll(self) -> int | None:
        """The exit code of mpirun (minus the signal if one ended it); None while it runs. Finds new ranks."""
        returncode = super().poll()
        now = time.monotonic()
        if returncode is None and len(self.ranks) < self.world_size and now >= self._next_check:
            self._next_check = now + POLL_PERIOD
            self._check()
        return returncode

    def _check(self) -> None:
        try:
            root = psutil.Process(self._child.pid)
        except psutil.Error:
            return
        members = processes.family(root)
        self._family.update({process.pid: process for process in members})
        # Without a process manager the child is the only rank.
        ranks = {0: root} if self.world_size == 1 else processes.ranks_among(members)
        self.ranks.update(ranks)

    def gone(self) -> Sequence[int]:
        """Ranks that no longer run; first those without a log, which ended as they started."""
        gone = {rank for rank, process in self.ranks.items() if not processes.runs(process)}
        if time.monotonic() > self._started + UNSEEN:
            gone |= self._unseen
        else:
            gone |= {rank for process, rank in self._named_processes().items() if not psutil.pid_exists(process)}
        order = [rank for rank in self._exits.order() if rank in gone]
        return [*sorted(gone - set(order)), *order]

    @property
    def _unseen(self) -> set[int]:
        return set(range(self.world_size)) - set(self.ranks)

    def _named_processes(self) -> dict[int, int]:
        """Ranks by process id, from their own events: a rank may start and end between two searches."""
        started = newest(self.run, self.number, self._unseen, "attempt_start")
        return {int(record["pid"]): rank for rank, record in started.items()}

    def statuses(self, returncode: int) -> dict[int, int]:
        """Exit status of the ranks that did not end with 0, as far as mpirun reports it."""
        pids = self._named_processes() | {process.pid: rank for rank, process in self.ranks.items()}
        return statuses(self.mpi, returncode, self.output(), pids, self._order_of_ends())

    def _order_of_ends(self) -> Sequence[int]:
        """All ranks by their end; empty if it is not known."""
        # A rank without a log may have ended before all others; one whose log is open has not ended yet.
        all_logged = all(self.run.log(self.number, rank).exists() for rank in range(self.world_size))
        return self._exits.order() if all_logged else ()

    def guess(self, returncode: int) -> Cause | None:
        """The rank that ended first, where its end made MPI end the others."""
        return ended_by_mpi(returncode, self._order_of_ends(), self.ends_of_logs())

    def verdict(self, returncode: int) -> Cause | None:
        """None: mpirun reports exit statuses only."""
        return None

    def ask_to_leave(self) -> None:
        """SIGTERM to the ranks."""
        # Never to mpirun, which would kill them.
        self._check()
        processes.send(self.ranks.values(), signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything now, including what mpirun left behind."""
        if self._child.poll() is None:
            self._check()
            self._child.kill()
            self._child.wait()
        processes.kill(process for pid, process in self._family.items() if pid != self._child.pid)
        if self.mpi == "openmpi":
            daemon_files.remove_of(self._child.pid)
        self._exits.close()


def start_child(command: RankCommand) -> subprocess.Popen[bytes]:
    """Start the process that starts the ranks; its output goes to the attempt's launcher.log. Raises OrtflowError."""
    log = command.run.launcher_log(command.number)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise OrtflowError(f"cannot open {log}: {error.strerror}") from error
    with os.fdopen(descriptor, "ab") as output:
        try:
            return subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=dict(command.environment),
                # The terminal sends a Ctrl-C to its whole foreground process group, and mpirun would kill the ranks.
                start_new_session=True,
                preexec_fn=processes.dies_with_parent(),
            )
        except OSError as error:
            raise OrtflowError(f"{command.argv[0]} cannot be started: {error.strerror}") from error
