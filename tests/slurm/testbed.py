"""A testbed as the tests use it: Slurm commands, and injected faults."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project import FEW_CORES

SCRIPTS = Path(__file__).parent.parent / "testbeds" / "slurm"
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
IDLE_WITHIN = 150.0
"""Seconds; a job that ended while the controller was away is completing for a minute more."""


def wait_until(condition: Callable[[], Any], timeout: float, what: Callable[[], str] | str = "") -> None:
    """Wait for a condition; `what` is shown if it does not become true.

    A query that starts a command leaves three quarters of the time to the run that it waits for.
    """
    end = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < end, f"not true within {timeout:g} s: {what() if callable(what) else what}"
        time.sleep(min(max(0.1, 3 * (now - begun)), 2.0))


@dataclass(frozen=True)
class Testbed:
    """A running testbed."""

    __test__ = False
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user's shell on the login node."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORTFLOW_", "PMI", "OMPI_", "SLURM_", "SBATCH_", "MPI"))
        }
        return {**kept, **FEW_CORES, "SLURM_CONF": str(self.folder / "etc/slurm.conf"), "PYTHONWARNINGS": "default"}

    def ask(self, *command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def reported(self, *command: str) -> str:
        """Output of a Slurm command that must succeed."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *arguments: str) -> str:
        """Submit; the job's id."""
        return self.reported("sbatch", "--parsable", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.reported("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s+\w+=|\s*$)", text))

    def state(self, number: str) -> str:
        """Slurm's state of a job."""
        return self.job(number)["JobState"]

    def ended(self, number: str, timeout: float) -> dict[str, str]:
        """The job's fields once it has ended."""
        wait_until(lambda: self.state(number) in FINAL, timeout, lambda: str(self.job(number)))
        return self.job(number)

    def hosts(self, number: str) -> list[str]:
        """Nodes of a job, the batch step's first."""
        return self.reported("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    @property
    def nodes(self) -> list[str]:
        """All nodes."""
        return sorted(set(self.reported("sinfo", "-h", "-N", "-o", "%N").split()))

    def node(self, action: str, name: str, *command: str) -> str:
        """Boot a node, switch it off, or run a command there: see tests/testbeds/slurm/node."""
        return self._script("node", action, name, *command)

    def controller(self, action: str) -> None:
        """Start, stop, kill, freeze or thaw slurmctld."""
        self._script("controller", action)

    def _script(self, name: str, *arguments: str) -> str:
        done = self.ask(str(SCRIPTS / name), "--testbed", str(self.folder), *arguments, timeout=120)
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    @contextmanager
    def lacking(self, name: str, path: Path) -> Iterator[None]:
        """Make a node see an empty folder at `path`."""
        self.node("exec", name, "mount", "-t", "tmpfs", "none", str(path))
        try:
            yield
        finally:
            self.node("exec", name, "umount", "-l", str(path))

    def grace(self, seconds: int) -> None:
        """Set the grace time of preempted jobs."""
        self.reported("scontrol", "update", "partitionname=main", f"GraceTime={seconds}")

    def preempt(self, number: str, seconds: int = 8) -> str:
        """Submit a job of higher priority for the nodes of a job; its id."""
        nodes = ",".join(self.hosts(number))
        return self.sbatch(
            "--partition=urgent", "--exclusive", f"--nodes={len(self.hosts(number))}", f"--nodelist={nodes}",
            "--time=5", "--output=/dev/null", "--job-name=urgent", "--chdir=/", f"--wrap=sleep {seconds}",
        )  # fmt: skip

    def restore(self) -> None:
        """Restore the initial state: all nodes up and idle, the controller running, nothing queued."""
        if (self.folder / "run/slurmctld.pid").exists():
            self.ask(str(SCRIPTS / "controller"), "--testbed", str(self.folder), "thaw")
        if self.ask("scontrol", "ping").returncode:
            self.controller("start")
        queued = self.reported("squeue", "-h", "-o", "%A").split()
        if queued:
            self.ask("scancel", *queued)
        for name in self.nodes:
            if (up := self._slurmd_runs(name)) is None:
                self.node("start", name)
            elif not up:
                self.node("slurmd-start", name)
        self.grace(0)
        wait_until(self._idle, IDLE_WITHIN, lambda: self.reported("sinfo", "-N") + self.reported("squeue"))

    def _slurmd_runs(self, name: str) -> bool | None:
        """Whether the node's daemon is up; None where the node is off."""
        probe = f'kill -0 "$(cat "{self.folder}/run/slurmd.{name}.pid")" && echo up || echo down'
        done = self.ask(str(SCRIPTS / "node"), "--testbed", str(self.folder), "exec", name, "sh", "-c", probe)
        return None if done.returncode else done.stdout.strip() == "up"

    def _idle(self) -> bool:
        states = self.reported("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        for line in states:
            name, state = line.split()
            if state.startswith(("down", "drain")):
                self.ask("scontrol", "update", f"nodename={name}", "state=resume")
        return all(line.split()[1] == "idle" for line in states) and not self.reported("squeue", "-h")
