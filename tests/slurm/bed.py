"""A bed seen from the tests: commands of Slurm's on it, and the accidents that can be had there."""

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

SCRIPTS = Path(__file__).parent.parent / "beds" / "slurm"
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
IDLE_WITHIN = 150.0
"""Seconds; a job that ended while the controller was away is completing for a minute more."""


def wait_until(condition: Callable[[], Any], timeout: float, what: Callable[[], str] | str = "") -> None:
    """Wait for a condition; `what` is told if it does not come."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:g} s in vain: {what() if callable(what) else what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Bed:
    """A running bed."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a person's shell on the login node has."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORTFLOW_", "PMI", "OMPI_", "SLURM_", "SBATCH_", "MPI"))
        }
        return {**kept, "SLURM_CONF": str(self.folder / "etc/slurm.conf"), "PYTHONWARNINGS": "default"}

    def ask(self, *command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def told(self, *command: str) -> str:
        """What a command of Slurm's that must work prints."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *arguments: str) -> str:
        """Submit; the job's id."""
        return self.told("sbatch", "--parsable", *arguments)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.told("scontrol", "show", "job", "-o", number)
        return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s+\w+=|\s*$)", text))

    def state(self, number: str) -> str:
        """Slurm's word for how a job is."""
        return self.job(number)["JobState"]

    def ended(self, number: str, timeout: float) -> dict[str, str]:
        """The job as it is when Slurm is done with it."""
        wait_until(lambda: self.state(number) in FINAL, timeout, lambda: str(self.job(number)))
        return self.job(number)

    def hosts(self, number: str) -> list[str]:
        """Nodes of a job, the batch step's first."""
        return self.told("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    @property
    def nodes(self) -> list[str]:
        """All nodes."""
        return sorted(set(self.told("sinfo", "-h", "-N", "-o", "%N").split()))

    def node(self, action: str, name: str, *command: str) -> str:
        """Boot a node, switch it off, or run a command there: see tests/beds/slurm/node."""
        return self._script("node", action, name, *command)

    def controller(self, action: str) -> None:
        """Start, stop, kill, freeze or thaw slurmctld."""
        self._script("controller", action)

    def _script(self, name: str, *arguments: str) -> str:
        done = self.ask(str(SCRIPTS / name), "--bed", str(self.folder), *arguments, timeout=120)
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    @contextmanager
    def lacking(self, name: str, path: Path) -> Iterator[None]:
        """A node that sees an empty folder where others see `path`."""
        self.node("exec", name, "mount", "-t", "tmpfs", "none", str(path))
        try:
            yield
        finally:
            self.node("exec", name, "umount", "-l", str(path))

    def grace(self, seconds: int) -> None:
        """How long a preempted job may stay."""
        self.told("scontrol", "update", "partitionname=main", f"GraceTime={seconds}")

    def preempt(self, number: str, seconds: int = 8) -> str:
        """Submit something more important for the nodes of a job; its id."""
        nodes = ",".join(self.hosts(number))
        return self.sbatch(
            "--partition=urgent", "--exclusive", f"--nodes={len(self.hosts(number))}", f"--nodelist={nodes}",
            "--time=5", "--output=/dev/null", "--job-name=urgent", "--chdir=/", f"--wrap=sleep {seconds}",
        )  # fmt: skip

    def restore(self) -> None:
        """As it was in the beginning: all nodes up and idle, the controller there, nothing queued."""
        if (self.folder / "run/slurmctld.pid").exists():
            self.ask(str(SCRIPTS / "controller"), "--bed", str(self.folder), "thaw")
        if self.ask("scontrol", "ping").returncode:
            self.controller("start")
        queued = self.told("squeue", "-h", "-o", "%A").split()
        if queued:
            self.ask("scancel", *queued)
        for name in self.nodes:
            if (up := self._slurmd_runs(name)) is None:
                self.node("start", name)
            elif not up:
                self.node("slurmd-start", name)
        self.grace(0)
        wait_until(self._idle, IDLE_WITHIN, lambda: self.told("sinfo", "-N") + self.told("squeue"))

    def _slurmd_runs(self, name: str) -> bool | None:
        """Whether the node's daemon is up; None where the node is off."""
        probe = f'kill -0 "$(cat "{self.folder}/run/slurmd.{name}.pid")" && echo up || echo down'
        done = self.ask(str(SCRIPTS / "node"), "--bed", str(self.folder), "exec", name, "sh", "-c", probe)
        return None if done.returncode else done.stdout.strip() == "up"

    def _idle(self) -> bool:
        states = self.told("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t").splitlines()
        for line in states:
            name, state = line.split()
            if state.startswith(("down", "drain")):
                self.ask("scontrol", "update", f"nodename={name}", "state=resume")
        return all(line.split()[1] == "idle" for line in states) and not self.told("squeue", "-h")
