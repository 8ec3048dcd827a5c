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

from forks import run_command
from kubernetes_testbed import Object, Space, wait_until
from project import FEW_CORES, Project, curve, evaluations, leftovers, of_kind

MOUNT = "/ortflow"
CLAIM = "data"
SHAPE: dict[str, Any] = {
    "train__steps": 40,
    "train__evaluation": {"every_steps": 10},
    "checkpoint__every_steps": 5,
    "restart": {"failures": 5, "preemptions": 9, "backoff": {"first": 0.0, "limit": 0.0}},
}
PLACE: dict[str, Any] = {
    "resources": {"nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 1, "memory": "1Gi"},
    "backends__kubernetes": {
        "image": "localhost/ortflow:testbed",
        "folder": f"{MOUNT}/project",
        "grace_seconds": 20,
        "volume": {"mount": MOUNT, "claim": CLAIM},
        "env": FEW_CORES,
    },
}
RANKS = range(4)
STARTS = 120.0
"""Seconds from the submission to the first step, on two busy cores."""
ENDS = 300.0
"""Seconds that a run may take to its end, with a restart in it."""


def make_project(folder: Path) -> Project:
    """A model and data that pods can read too."""
    project = Project.make(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return project


CLIENT = ("ortflow.launchers.kubernetes.launcher", "kubernetes.client", "kubernetes.dynamic")
"""Modules of a command that asks the API server; their import takes a second."""


@dataclass(frozen=True)
class Cluster:
    """A namespace with a volume, and the folder on this machine from which the user submits."""

    space: Space
    project: Project
    volume: Path
    folder: Path

    @classmethod
    def make(cls, space: Space, project: Project, folder: Path) -> Cluster:
        """Copy the project's model and data to the volume, where its run files expect them."""
        volume = space.claim(CLAIM)
        (volume / "project").mkdir()
        shutil.copy(project.folder / "model.onnx", volume / "project")
        shutil.copytree(project.folder / "set", volume / "project/set")
        return cls(space, project, volume, folder)

    def ortflow(self, *arguments: str, timeout: float = ENDS, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `ortflow ARGUMENTS` as a user with a kubeconfig does."""
        return run_command(
            *arguments, folder=self.folder, environment={**self.space.testbed.environment, **environment},
            timeout=timeout, modules=CLIENT,
        )  # fmt: skip

    def write(self, name: str, **changes: Any) -> Path:
        """Write a run file of the usual shape to the folder from which it is submitted."""
        place = deepcopy(PLACE)
        place["backends__kubernetes"]["namespace"] = self.space.name
        return Project(self.folder).write(name, **{**deepcopy(SHAPE), **place, **changes})

    def submit(self, name: str, *arguments: str, **changes: Any) -> Run:
        """Submit a run."""
        file = self.write(name, **changes)
        done = self.ortflow("submit", "--backend", "kubernetes", file.name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return Run(self, name)

    def run(self, name: str, *arguments: str, **changes: Any) -> Run:
        """Submit, and wait until the run has finished successfully."""
        run = self.submit(name, *arguments, **changes)
        run.finish()
        return run


@dataclass(frozen=True)
class Run:
    """A submitted run, read from the volume."""

    cluster: Cluster
    name: str

    @property
    def space(self) -> Space:
        return self.cluster.space

    @property
    def run_dir(self) -> Path:
        """The run directory on the volume, as seen from this machine."""
        return self.cluster.volume / "runs" / self.name

    def pods(self, component: str) -> list[Object]:
        """The run's pods of a role: launcher, worker, supervisor or tensorboard."""
        return self.space.pods(f"ortflow.dev/run={self.name},ortflow.dev/component={component}")

    def pod(self, component: str, index: int = 0) -> str:
        """The name of one pod; of several launchers the newest."""
        found = self.pods(component)
        assert found, self.transcript()
        if component == "launcher":
            found.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
        return str(found[index]["metadata"]["name"])

    def job(self) -> Object:
        """The run's newest MPIJob."""
        jobs = self.space.get("mpijobs", "-l", f"ortflow.dev/run={self.name}")["items"]
        assert jobs, self.transcript()
        return dict(max(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"])))

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Records of one kind in attempts.jsonl on the volume."""
        path = self.run_dir / "attempts.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [record for record in map(json.loads, _whole(lines)) if record["event"] == kind]

    def outcomes(self) -> list[str]:
        """The outcomes of the attempts."""
        return [record["outcome"] for record in self.records("end")]

    def steps(self) -> int:
        """The newest step of rank 0."""
        path = self.run_dir / "events/rank-0000.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        steps = [record["step"] for record in map(json.loads, _whole(lines)) if record["event"] == "step"]
        return max(steps, default=0)

    def until_step(self, step: int, timeout: float = STARTS) -> None:
        """Wait until the run has reached a step."""
        wait_until(lambda: self.steps() >= step, timeout, self.transcript)

    def status(self) -> dict[str, Any]:
        """The output of `ortflow status --json`."""
        done = self.cluster.ortflow("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def until_state(self, *states: str, timeout: float = ENDS) -> dict[str, Any]:
        """Wait until `ortflow status` reports a state; the whole status."""
        reported: dict[str, Any] = {}

        def there() -> bool:
            reported.update(self.status())
            return reported["state"] in states

        wait_until(there, timeout, lambda: f"{reported}\n{self.transcript()}")
        return reported

    def over(self) -> bool:
        """Whether the operator is done with the run: only a completion time means that."""
        return "completionTime" in self.job().get("status", {})

    def finish(self, timeout: float = ENDS) -> None:
        """Wait for the end, which must be a success."""
        wait_until(self.over, timeout, self.transcript)
        assert self.space.condition(self.job()["metadata"]["name"], "Succeeded"), self.transcript()
        assert of_kind(self.run_dir, "finished"), self.transcript()

    def transcript(self) -> str:
        """Everything that may explain a failed test."""
        records = self.run_dir / "attempts.jsonl"
        logs = [
            f"--- {path.relative_to(self.run_dir)}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.run_dir.rglob("*.log"))
        ]
        there = os.listdir(self.cluster.volume) if self.cluster.volume.exists() else "no volume"
        reported = records.read_text() if records.exists() else f"nothing at {self.run_dir}: {there}"
        return "\n".join([self.space.transcript(), reported, *logs])


def same_end(run_dir: Path, left_alone: Path) -> None:
    """Check that the result equals the undisturbed run's bit for bit, and that no temporary file is left."""
    for rank in RANKS:
        steps = [step for step, *_ in curve(run_dir, rank)]
        assert steps == sorted(set(steps)), f"a step of rank {rank} is recorded twice"
        assert curve(run_dir, rank) == curve(left_alone, rank)
    assert evaluations(run_dir) == evaluations(left_alone)
    assert (run_dir / "export/model.onnx").read_bytes() == (left_alone / "export/model.onnx").read_bytes()
    assert leftovers(run_dir) == []


def faults(cluster: Cluster, rank: int, step: int, do: str, attempt: int | None = 0) -> dict[str, Any]:
    """Changes to a run file that inject a fault into a rank, in all attempts if none is given: see support/faults."""
    return _sitecustomize(cluster, "FAULTS", json.dumps({"attempt": attempt, "rank": rank, "step": step, "do": do}))


def slow(cluster: Cluster, seconds: float, attempts: int = 1000) -> dict[str, Any]:
    """Changes to a run file that slow down the steps of the first attempts without using the cores."""
    return _sitecustomize(cluster, "SLOW", f"{seconds} {attempts}")


def holding(cluster: Cluster, phase: str, seconds: float) -> dict[str, Any]:
    """Changes of a run file that have a phase last so much longer, in every attempt."""
    return _sitecustomize(cluster, "HOLD", f"{phase} {seconds}")


def skewed(cluster: Cluster, module: str, seconds: float) -> dict[str, Any]:
    """Changes to a run file that put the clock of processes that run a module ahead of the others'."""
    return _sitecustomize(cluster, "SKEW", f"{module} {seconds}")


def _sitecustomize(cluster: Cluster, name: str, value: str) -> dict[str, Any]:
    shutil.copytree(Path(__file__).parent.parent / "support" / "faults", cluster.volume / "faults", dirs_exist_ok=True)
    return {"backends__kubernetes__env": {**FEW_CORES, "PYTHONPATH": f"{MOUNT}/faults", name: value}}


def _whole(lines: list[str]) -> list[str]:
    """The records, without the last one if it is incomplete."""
    return [line for line in lines if line.endswith("\n")]
