"""Runs on a testbed: a small real training on 2 nodes with 2 ranks each, submitted through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forks import run_command
from project import Project, curve, evaluations, leftovers, logs, of_kind
from testbed import FINAL, Testbed, wait_until

SHAPE: dict[str, Any] = {
    "train__steps": 40,
    "train__evaluation": {"every_steps": 10},
    "checkpoint__every_steps": 5,
    "resources": {"nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 1, "memory": "1Gi"},
    "restart": {"failures": 3, "preemptions": 9, "backoff": {"first": 0.0, "limit": 0.0}},
}
RANKS = range(4)
FAULTS = Path(__file__).parent.parent / "support" / "faults"
STARTS = 180.0
"""Seconds from the submission to the first step, on two cores that have much else to do."""
ENDS = 400.0
"""Seconds that a run may take to its end, with a restart by Slurm in it."""
PACE = 0.15
"""Seconds that a step of the first attempt lasts at least, so that an accident hits a run that is under way."""


@dataclass(frozen=True)
class Cluster:
    """A testbed and a folder that its nodes see, with a model and data."""

    testbed: Testbed
    project: Project
    ahead: float = 0.0
    """Seconds that the clock of those who call `ortflow` is ahead."""

    def ortflow(self, *arguments: str, timeout: float = 180, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `ortflow ARGUMENTS` as a person on the login node does."""
        if self.ahead:
            environment = {"PYTHONPATH": str(FAULTS), "SKEW": f"ortflow {self.ahead}", **environment}
        return run_command(
            *arguments, folder=self.project.folder, environment={**self.testbed.environment, **environment},
            timeout=timeout, modules=("ortflow.launchers.slurm.launcher",),
        )  # fmt: skip

    def write(self, name: str, **changes: Any) -> Path:
        """A run file of the usual shape."""
        return self.project.write(name, **deepcopy({**SHAPE, **changes}))

    def submit(self, name: str, *arguments: str, **changes: Any) -> Run:
        """Submit a run; what is to be followed."""
        file = self.write(name, **changes)
        done = self.ortflow("submit", "--backend", "slurm", file.name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return Run(self, name)

    def run(self, name: str, *arguments: str, **changes: Any) -> Run:
        """Submit, and wait for a good end."""
        run = self.submit(name, *arguments, **changes)
        run.finish()
        return run


@dataclass(frozen=True)
class Counted:
    """Slurm's commands, each call of which is put down."""

    path: str
    """The PATH of a process whose calls count."""
    record: Path

    @classmethod
    def make(cls, folder: Path) -> Counted:
        """With what stands before the commands in a folder."""
        record, commands = folder / "calls", folder / "counted"
        commands.mkdir()
        for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sinfo"):
            shim = commands / name
            shim.write_text(f'#!/bin/sh\necho "{name} $*" >>{record}\nexec {shutil.which(name)} "$@"\n')
            shim.chmod(0o755)
        return cls(f"{commands}{os.pathsep}{os.environ['PATH']}", record)

    def calls(self) -> list[str]:
        """All until now."""
        return self.record.read_text().splitlines() if self.record.exists() else []


@dataclass(frozen=True)
class Run:
    """A submitted run."""

    cluster: Cluster
    name: str

    @property
    def testbed(self) -> Testbed:
        return self.cluster.testbed

    @property
    def run_dir(self) -> Path:
        return self.cluster.project.run_dir(self.name)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Records of attempts.jsonl."""
        path = self.run_dir / "attempts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [record for record in whole if record["event"] == kind]

    @property
    def job(self) -> str:
        """The id of its newest job."""
        return str(self.records("submit")[-1]["job"])

    @property
    def restarts(self) -> int:
        """How often Slurm started the job again."""
        return int(self.testbed.job(self.job)["Restarts"])

    def steps(self) -> int:
        """The newest step of rank 0."""
        path = self.run_dir / "events/rank-0000.jsonl"
        if not path.exists():
            return 0
        lines = path.read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return max((record["step"] for record in whole if record["event"] == "step"), default=0)

    def until_step(self, step: int, timeout: float = STARTS) -> None:
        """Wait until it has come so far."""
        wait_until(lambda: self.steps() >= step, timeout, self.transcript)

    def until_attempt(self, number: int, step: int, timeout: float = ENDS) -> None:
        """Wait until an attempt has come to a step."""

        def there() -> bool:
            return any(e["attempt"] == number and e["step"] >= step for e in of_kind(self.run_dir, "step"))

        wait_until(there, timeout, self.transcript)

    def until_state(self, *states: str, timeout: float = ENDS) -> dict[str, Any]:
        """Wait until `ortflow status` says so; the whole status."""
        reported: dict[str, Any] = {}

        def there() -> bool:
            reported.update(self.status())
            return reported["state"] in states

        wait_until(there, timeout, lambda: f"{reported}\n{self.transcript()}")
        return reported

    def status(self) -> dict[str, Any]:
        """What `ortflow status --json` says."""
        done = self.cluster.ortflow("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def finish(self, timeout: float = ENDS) -> None:
        """Wait for the end, which has to be a good one."""
        wait_until(lambda: self.testbed.state(self.job) in FINAL, timeout, self.transcript)
        assert self.testbed.state(self.job) == "COMPLETED", self.transcript()
        assert of_kind(self.run_dir, "finished"), self.transcript()

    def outcomes(self) -> list[str]:
        """How its attempts ended."""
        return [record["outcome"] for record in self.records("end")]

    def log(self) -> str:
        """What the batch step printed."""
        return (self.run_dir / f"logs/slurm-{self.job}.log").read_text()

    def transcript(self) -> str:
        """Everything that may tell why a test failed."""
        records = self.run_dir / "attempts.jsonl"
        job = self.testbed.ask("scontrol", "show", "job", "-o", self.job).stdout if self.records("submit") else "no job"
        return f"{job}\n{records.read_text() if records.exists() else ''}\n{logs(self.run_dir)}"


def same_end(run: Run, undisturbed: Run) -> None:
    """Bit for bit the end of the run that nobody touched, and nothing left lying about."""
    ours, theirs = run.run_dir, undisturbed.run_dir
    for rank in RANKS:
        steps = [step for step, *_ in curve(ours, rank)]
        assert steps == sorted(set(steps)), f"a step stands twice in the record\n{run.transcript()}"
        assert curve(ours, rank) == curve(theirs, rank), run.transcript()
    assert evaluations(ours) == evaluations(theirs)
    assert (ours / "export/model.onnx").read_bytes() == (theirs / "export/model.onnx").read_bytes()
    assert leftovers(ours) == []


def faults(rank: int, step: int, do: str, attempt: int = 0) -> dict[str, Any]:
    """Changes of a run file that inject a fault into a rank: see support/faults/sitecustomize.py."""
    return _sitecustomize("FAULTS", json.dumps({"attempt": attempt, "rank": rank, "step": step, "do": do}))


def slow(seconds: float, attempts: int = 1000) -> dict[str, Any]:
    """Changes of a run file that have steps of the first attempts take so long, without work for the cores."""
    return _sitecustomize("SLOW", f"{seconds} {attempts}")


def halted(event: str, step: int, seconds: float) -> dict[str, Any]:
    """Changes of a run file that have rank 0 stand still for a while behind an event of a step."""
    return _sitecustomize("HALT", f"{event} {step} {seconds}")


def unlocked() -> dict[str, Any]:
    """Changes of a run file that have locks keep nobody out."""
    return _sitecustomize("UNLOCKED", "1")


def clocks(folder: Path) -> dict[str, Any]:
    """Changes of a run file that have every node's clock go ahead by what its file in a folder says."""
    return _sitecustomize("CLOCKS", str(folder))


def skewed(module: str, seconds: float) -> dict[str, Any]:
    """Changes of a run file that have the clock of those who run a module go ahead."""
    return _sitecustomize("SKEW", f"{module} {seconds}")


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two of these together."""
    key = "backends__slurm__prologue"
    return {key: [*one[key], *other[key]]}


def _sitecustomize(name: str, value: str) -> dict[str, Any]:
    return {"backends__slurm__prologue": [f'export PYTHONPATH={FAULTS}:"$PYTHONPATH"', f"export {name}='{value}'"]}


def rank_processes(run_dir: Path) -> dict[int, psutil.Process]:
    """The running ranks of a run, by rank."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words[1:4] == ["-m", "ortflow.workflow.rank", str(run_dir)] and process.status() != "zombie":
                found[int(process.environ()["PMI_RANK"])] = process
        except (psutil.Error, KeyError):
            continue
    return found
