"""The command of a worker pod: `python -m ortflow.launchers.kubernetes.worker`. It runs sshd for mpirun to come in by.

Plain sshd would do while nothing happens. But it ends with 0 on SIGTERM, so that an evicted worker counts as done and
is never replaced, and it takes the ranks along before they have saved. This one passes SIGTERM on to the ranks, waits
until they have saved and left, and never ends with 0 before the run has ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import psutil

from ortflow.launchers import processes
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.sshd import keys, start_sshd
from ortflow.launchers.kubernetes.witness import Witness, key_digest, tell
from ortflow.launchers.memory import oom_kills
from ortflow.manifests.local import RANK_MODULE
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, OrtflowError, UserError
from ortflow.workflow.room import is_full

TERMINATED = 128 + signal.SIGTERM
PERIOD = 0.25
RELEASE_PERIOD = 2.0
"""Seconds between two looks at the volume."""


class Worker:
    """One life of a worker's container."""

    def __init__(self, pod: Pod) -> None:
        self._pod, self._host = pod, socket.gethostname()
        self._told_to_leave = False
        self._kills = oom_kills() or 0
        self._witness = Witness(socket.gethostbyname(self._host), time.time(), key=key_digest(keys()))
        self._released = pod.release()
        self._untold = False
        """The volume was full when our word should have been put there."""

    def work(self) -> int:
        """Stay until told to leave; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        self._tell()
        sshd = start_sshd(self._pod.ssh_port)
        next_look = 0.0
        while not self._told_to_leave:
            if sshd in _reaped():
                print("sshd has ended", flush=True)
                return EXIT_FAILURE
            if (now := time.monotonic()) >= next_look:
                next_look = now + RELEASE_PERIOD
                if self._pod.release() != self._released:
                    print("the run has ended: nothing is left to do here", flush=True)
                    return EXIT_DONE
                self._count_kills()
                self._look_at_key()
                self._catch_up()
            time.sleep(PERIOD)
        self._witness = replace(self._witness, leaving=True)
        self._tell()
        processes.send(ranks(), signal.SIGTERM)
        # However long it takes: the kubelet ends it when the grace period is over.
        while ranks():
            _reaped()
            self._catch_up()
            time.sleep(PERIOD)
        return TERMINATED

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._told_to_leave = True

    def _count_kills(self) -> None:
        kills = (oom_kills() or 0) - self._kills
        if kills > self._witness.out_of_memory:
            print("the kernel killed a process of this pod: out of memory", flush=True)
            self._witness = replace(self._witness, out_of_memory=kills)
            self._tell()

    def _look_at_key(self) -> None:
        if (key := key_digest(keys())) != self._witness.key:
            print("the ssh key of the run was replaced", flush=True)
            self._witness = replace(self._witness, key=key)
            self._tell()

    def _catch_up(self) -> None:
        if self._untold:
            self._tell()

    def _tell(self) -> None:
        try:
            tell(self._pod, self._host, self._witness)
            self._untold = False
        except OSError as error:
            if is_full(error):
                # Ranks wait for room, and die with us.
                self._untold = True
                return
            raise UserError(
                f"{self._pod.mount} cannot be written by uid {os.getuid()}: {error.strerror}",
                where="backends.kubernetes.volume",
                fix="set backends.kubernetes.security to the owner of the volume, or open the volume for this uid",
            ) from error


def ranks() -> list[psutil.Process]:
    """The ranks in this pod that run."""
    return [process for process in psutil.process_iter() if _is_rank(process)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return RANK_MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reaped() -> set[int]:
    """Children that have ended: as the first process of the container we have those of others too."""
    return set(_reap())


def _reap() -> Iterator[int]:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            yield pid


def main() -> int:
    """Work; the exit code."""
    try:
        return Worker(Pod.from_environment()).work()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
