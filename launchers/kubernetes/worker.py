"""The command of a worker pod: `python -m ortflow.launchers.kubernetes.worker`. It runs sshd for mpirun.

Plain sshd is not enough: it ends with 0 on SIGTERM, so that an evicted worker counts as succeeded and
is never replaced, and it ends the ranks before they have saved. This command passes SIGTERM on to the ranks, waits
until they have saved and exited, and never ends with 0 before the run has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import psutil

from ortflow.launchers.kubernetes.account import ensure_account
from ortflow.launchers.kubernetes.pod import FINISHED, Pod
from ortflow.launchers.kubernetes.sshd import keys, start_sshd
from ortflow.launchers.kubernetes.worker_report import WorkerReport, key_digest, write_report
from ortflow.launchers.supervision import processes
from ortflow.manifests.local import RANK_MODULE
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, OrtflowError, UserError
from ortflow.workflow.system.disk_space import is_full
from ortflow.workflow.system.oom import oom_kills

TERMINATED = 128 + signal.SIGTERM
PERIOD = 0.25
OPERATOR = 20.0
"""Seconds in which the operator deletes the workers of a finished run."""
RELEASE_PERIOD = 2.0
"""Seconds between two checks of the volume."""


class Worker:
    """One start of a worker's container."""

    def __init__(self, pod: Pod) -> None:
        self._pod, self._host = pod, pod.name
        self._asked_to_leave = False
        self._kills = oom_kills() or 0
        self._worker_report = WorkerReport(pod.address, time.time(), key=key_digest(keys()), node=self._pod.node)
        self._released = pod.release()
        self._leaves_at = 0.0
        self._unwritten = False
        """The volume was full when the report had to be written."""

    def work(self) -> int:
        """Run until asked to end; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        self._write_report()
        sshd = start_sshd(self._pod.ssh_port, self._pod.name, self._pod.node)
        next_check = 0.0
        while not self._asked_to_leave:
            if sshd in _reaped():
                print("sshd has ended", flush=True)
                return EXIT_FAILURE
            if (now := time.monotonic()) >= next_check:
                next_check = now + RELEASE_PERIOD
                if self._is_released(now):
                    print("the run has ended: this worker exits", flush=True)
                    return EXIT_DONE
                self._count_kills()
                self._check_key()
                self._catch_up()
            time.sleep(PERIOD)
        self._worker_report = replace(self._worker_report, leaving=True)
        self._write_report()
        processes.send(ranks(), signal.SIGTERM)
        # Without a limit: the kubelet ends the container when the grace period is over.
        while ranks():
            _reaped()
            self._catch_up()
            time.sleep(PERIOD)
        return TERMINATED

    def _is_released(self, now: float) -> bool:
        """Whether the run has ended, and the operator does not delete this pod; `now` is monotonic."""
        text = self._pod.release()
        if text == self._released:
            return False
        self._leaves_at = self._leaves_at or now + (OPERATOR if (text or "").startswith(FINISHED) else 0.0)
        return now >= self._leaves_at

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_leave = True

    def _count_kills(self) -> None:
        kills = (oom_kills() or 0) - self._kills
        if kills > self._worker_report.out_of_memory:
            print("the kernel killed a process of this pod: out of memory", flush=True)
            self._worker_report = replace(self._worker_report, out_of_memory=kills)
            self._write_report()

    def _check_key(self) -> None:
        if (key := key_digest(keys())) != self._worker_report.key:
            print("the ssh key of the run was replaced", flush=True)
            self._worker_report = replace(self._worker_report, key=key)
            self._write_report()

    def _catch_up(self) -> None:
        if self._unwritten:
            self._write_report()

    def _write_report(self) -> None:
        try:
            write_report(self._pod, self._host, self._worker_report)
            self._unwritten = False
        except OSError as error:
            if is_full(error):
                # Ranks wait for space, and would die with this process.
                self._unwritten = True
                return
            raise UserError(
                f"{self._pod.mount} cannot be written by uid {os.getuid()}: {error.strerror}",
                where="backends.kubernetes.volume",
                fix="set backends.kubernetes.security to the owner of the volume, or open the volume for this uid",
            ) from error


def ranks() -> list[psutil.Process]:
    """The running ranks in this pod."""
    return [process for process in psutil.process_iter() if _is_rank(process)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return RANK_MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _reaped() -> set[int]:
    """Reap ended children and return their ids: the first process of a container also gets orphans."""
    return set(_reap())


def _reap() -> Iterator[int]:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            yield pid


def main() -> int:
    """Run the worker; returns the exit code."""
    try:
        ensure_account(keys().parent)
        return Worker(Pod.from_environment()).work()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
