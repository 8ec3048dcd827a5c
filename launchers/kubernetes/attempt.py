"""One attempt in Kubernetes: mpirun in the launcher pod, its ranks over ssh in the workers. Used by the keeper.

mpirun alone is not believed. Open MPI 5 may start all ranks beside itself, or end with 0 after it has lost a host, and
no mpirun hears of a node whose power is gone; so the ranks' own events tell where they run, and each host is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import psutil

from ortflow.launchers import processes
from ortflow.launchers.attempt import Child
from ortflow.launchers.cause import Cause, statuses
from ortflow.launchers.kubernetes.hosts import addresses, short
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.witness import Witnesses, conclude, hear
from ortflow.launchers.kubernetes.words import Process, first_end
from ortflow.launchers.records import Outcome
from ortflow.launchers.tail import ends_of, newest
from ortflow.manifests.local import MpiKind
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER
from ortflow.workflow.rundir import RunDir

CHECK = 1.0
"""Seconds between two looks at where ranks are, until all have begun."""
LOOK = 5.0
"""Seconds between two looks at the hosts."""
SILENCE = 45.0
"""Seconds of silence after which a host is lost: a cable that was out for a moment costs nothing."""
SETTLE = 3.0
"""Seconds that a worker has to tell what happened to it."""


class PodAttempt(Child):
    """A started attempt; `poll` often."""

    def __init__(
        self,
        run: RunDir,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        kind: MpiKind,
        pod: Pod,
        hosts: Mapping[str, str],
        slots: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kind, self._pod, self._slots, self._clock = kind, pod, slots, clock
        self._hosts = dict(hosts)
        """Address of each host, in the order of the ranks."""
        self._before: Witnesses = hear(pod, map(short, hosts))
        self._heard = dict.fromkeys(hosts, self._clock.monotonic())
        self._lost: set[str] = set()
        self._misplaced: str | None = None
        self._processes: dict[int, Process] = {}
        """Where each rank that has begun is."""
        self._next_check = 0.0
        self._next_look = self._clock.monotonic() + LOOK
        super().__init__(run, number, command, environment)

    def poll(self) -> int | None:
        """The exit code of mpirun (minus the signal if one ended it); None while it runs."""
        returncode = super().poll()
        if len(self._processes) < self._world_size and (now := self._clock.monotonic()) >= self._next_check:
            self._next_check = now + CHECK
            self._look_where()
        if returncode is None and self._misplaced is not None:
            self.kill()
            return EXIT_USER
        return self._proven() if returncode == EXIT_DONE else returncode

    def gone(self) -> set[int]:
        """Ranks on hosts that are another pod by now, or have been silent for too long."""
        if (now := self._clock.monotonic()) >= self._next_look:
            self._next_look = now + LOOK
            for host, address in addresses(list(self._hosts), self._pod.ssh_port).items():
                if address == self._hosts[host]:
                    self._heard[host] = now
                elif address is not None or now > self._heard[host] + SILENCE:
                    self._lost.add(host)
        return {
            place * self._slots + k
            for place, host in enumerate(self._hosts)
            if host in self._lost
            for k in range(self._slots)
        }

    def statuses(self, returncode: int) -> dict[int, int]:
        """Exit status of the ranks that did not end with 0, as far as mpirun tells it."""
        if self._kind == "mpich":
            self._learn_ranks()
            return first_end(self.output(), {process: rank for rank, process in self._processes.items()})
        return statuses(self._kind, returncode, self.output(), {})

    def verdict(self, returncode: int) -> Cause | None:
        """What workers and hosts tell of an end that no rank can tell of."""
        if self._misplaced is not None:
            return Cause(Outcome.USER_ERROR, EXIT_USER, self._misplaced)
        if returncode in (EXIT_DONE, EXIT_PREEMPTED, EXIT_USER):
            return None
        failed = newest(self.run, self.number, range(self._world_size), "failure", limit=4096)
        end = self._clock.monotonic() + (0.0 if failed else SETTLE)
        while True:
            silent = {short(host) for host in self._lost}
            if (found := conclude(self._before, hear(self._pod, self._before), silent)) is not None:
                return found
            if self._clock.monotonic() >= end:
                break
            self._clock.sleep(0.2)
        known = addresses(list(self._hosts), self._pod.ssh_port)
        silent = {short(host) for host, address in known.items() if address != self._hosts[host]}
        return conclude(self._before, hear(self._pod, self._before), silent)

    def ask_to_leave(self) -> None:
        """The stop file tells ranks: no signal of ours reaches another pod."""

    def kill(self) -> None:
        """End everything now: without mpirun the far sides end their ranks."""
        if self._child.poll() is None:
            family = processes.family(psutil.Process(self._child.pid))
            self._child.kill()
            self._child.wait()
            processes.kill(process for process in family if process.pid != self._child.pid)

    def _proven(self) -> int:
        """What the ranks make of mpirun's 0: the exit code if each of them says so itself."""
        ends = ends_of(self.run, self.number, range(self._world_size))
        if len(ends) < self._world_size:
            return EXIT_FAILURE
        return EXIT_PREEMPTED if "preempted" in ends.values() else EXIT_DONE

    def _look_where(self) -> None:
        """Compare, once all ranks have begun, where they are with where they should be."""
        self._learn_ranks()
        if len(self._processes) < self._world_size:
            return
        found = Counter(host for host, _ in self._processes.values())
        wanted = {short(host): self._slots for host in self._hosts}
        if dict(found) != wanted:
            places = ", ".join(f"{count} on {host}" for host, count in found.items())
            self._misplaced = (
                f"mpirun started the ranks in the wrong pods ({places}, where {self._slots} on each of "
                f"{', '.join(wanted)} were asked for): the MPI of the image does not follow ortflow's command"
            )

    def _learn_ranks(self) -> None:
        """Take in where ranks are that have begun since the last time."""
        unknown = set(range(self._world_size)) - self._processes.keys()
        for rank, record in newest(self.run, self.number, unknown, "attempt_start").items():
            self._processes[rank] = (str(record["host"]), int(record["pid"]))

    @property
    def _world_size(self) -> int:
        return len(self._hosts) * self._slots
