"""One attempt in Kubernetes: mpirun in the launcher pod, its ranks over ssh in the workers. Used by the supervisor
process.

mpirun alone is not reliable. Open MPI 5 may start all ranks in its own pod, or end with 0 after it has lost a host, and
no mpirun detects a node without power. So the ranks' own events show where they run, and each host is probed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import psutil

from ortflow.launchers.attempts.cause import Cause, statuses
from ortflow.launchers.attempts.tail import ends_of, newest
from ortflow.launchers.kubernetes.hosts import addresses, short
from ortflow.launchers.kubernetes.hydra_output import Process, early_kill, first_end
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.worker_report import WorkerReports, conclude, read_reports
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervision import processes
from ortflow.launchers.supervision.attempt import Child, RankCommand
from ortflow.manifests.local import MpiKind
from ortflow.workflow.comm import daemon_files
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

CHECK = 1.0
"""Seconds between two checks of where ranks run, until all have started."""
PROBE = 5.0
"""Seconds between two probes of the hosts."""
SILENCE = 45.0
"""Seconds without an answer after which a host is lost: a short network interruption costs nothing."""
SETTLE = 3.0
"""Seconds that a worker has to report what happened to it."""


class PodAttempt(Child):
    """A started attempt; `poll` must be called often."""

    def __init__(
        self,
        command: RankCommand,
        kind: MpiKind,
        pod: Pod,
        hosts: Mapping[str, str],
        slots: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kind, self._pod, self._slots, self._clock = kind, pod, slots, clock
        self._hosts = dict(hosts)
        """Address of each host, in the order of the ranks."""
        self._before: WorkerReports = read_reports(pod, map(short, hosts))
        self._heard = dict.fromkeys(hosts, self._clock.monotonic())
        self._lost: set[str] = set()
        self._misplaced: str | None = None
        self._processes: dict[int, Process] = {}
        """The host of each rank that has started."""
        self._next_check = 0.0
        self._next_probe = self._clock.monotonic() + PROBE
        super().__init__(command)

    def poll(self) -> int | None:
        """The exit code of mpirun (minus the signal if one ended it); None while it runs."""
        returncode = super().poll()
        if len(self._processes) < self._world_size and (now := self._clock.monotonic()) >= self._next_check:
            self._next_check = now + CHECK
            self._find_ranks()
        if returncode is None and self._misplaced is not None:
            self.kill()
            return EXIT_USER
        return self._proven() if returncode == EXIT_DONE else returncode

    def gone(self) -> Sequence[int]:
        """Ranks on hosts that are a different pod now, or have not answered for too long."""
        if (now := self._clock.monotonic()) >= self._next_probe:
            self._next_probe = now + PROBE
            for host, address in addresses(list(self._hosts), self._pod.ssh_port, greets=False).items():
                if address == self._hosts[host]:
                    self._heard[host] = now
                elif address is not None or now > self._heard[host] + SILENCE:
                    self._lost.add(host)
        return [
            place * self._slots + k
            for place, host in enumerate(self._hosts)
            if host in self._lost
            for k in range(self._slots)
        ]

    def statuses(self, returncode: int) -> dict[int, int]:
        """Exit status of the ranks that did not end with 0, as far as mpirun reports it."""
        if self._kind == "mpich":
            self._learn_ranks()
            return first_end(self.output(), {process: rank for rank, process in self._processes.items()})
        return statuses(self._kind, returncode, self.output(), {})

    def verdict(self, returncode: int) -> Cause | None:
        """What workers and hosts report of an end that no rank can report."""
        if self._misplaced is not None:
            return Cause(Outcome.USER_ERROR, EXIT_USER, self._misplaced)
        if returncode in (EXIT_DONE, EXIT_PREEMPTED, EXIT_USER):
            return None
        failed = newest(self.run, self.number, range(self._world_size), "failure", limit=4096)
        end = self._clock.monotonic() + (0.0 if failed else SETTLE)
        while True:
            silent = {short(host) for host in self._lost}
            if (reason := conclude(self._before, read_reports(self._pod, self._before), silent)) is not None:
                return reason
            if self._clock.monotonic() >= end:
                break
            self._clock.sleep(0.2)
        host_addresses = addresses(list(self._hosts), self._pod.ssh_port, greets=False)
        silent = {short(host) for host, address in host_addresses.items() if address != self._hosts[host]}
        return conclude(self._before, read_reports(self._pod, self._before), silent)

    def guess(self, returncode: int) -> Cause | None:
        """The host of a rank that was killed while it started, or the rank whose MPI ended all."""
        early = early_kill(self.output()) if self._kind == "mpich" else None
        return early or super().guess(returncode)

    def ask_to_leave(self) -> None:
        """Ranks read the stop file: no signal reaches another pod."""

    def kill(self) -> None:
        """Kill everything now: without mpirun, its processes on the hosts end their ranks."""
        if self._child.poll() is None:
            family = processes.family(psutil.Process(self._child.pid))
            self._child.kill()
            self._child.wait()
            processes.kill(process for process in family if process.pid != self._child.pid)
            if self._kind == "openmpi":
                daemon_files.remove_of(self._child.pid)

    def _proven(self) -> int:
        """Check mpirun's exit code 0 against the ranks: the exit code if each rank recorded it."""
        ends = ends_of(self.run, self.number, range(self._world_size))
        if len(ends) < self._world_size:
            return EXIT_FAILURE
        return EXIT_PREEMPTED if "preempted" in ends.values() else EXIT_DONE

    def _find_ranks(self) -> None:
        """Compare where the ranks run with where they should run, when all have started."""
        self._learn_ranks()
        if len(self._processes) < self._world_size:
            return
        counts = Counter(host for host, _ in self._processes.values())
        slots = {short(host): self._slots for host in self._hosts}
        if dict(counts) != slots:
            places = ", ".join(f"{count} on {host}" for host, count in counts.items())
            self._misplaced = (
                f"mpirun started the ranks in the wrong pods ({places}, where {self._slots} on each of "
                f"{', '.join(slots)} were asked for): the MPI of the image does not follow ortflow's command"
            )

    def _learn_ranks(self) -> None:
        """Read the hosts of ranks that have started since the last call."""
        unknown = set(range(self._world_size)) - self._processes.keys()
        for rank, record in newest(self.run, self.number, unknown, "attempt_start").items():
            self._processes[rank] = (str(record["host"]), int(record["pid"]))

    @property
    def _world_size(self) -> int:
        return len(self._hosts) * self._slots
