"""A testbed (tests/testbeds/kubernetes) as the tests use it: commands on the cluster, and injected faults."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "testbeds" / "kubernetes"
SERVICES = ("etcd", "apiserver", "manager", "scheduler", "dns", "storage", "operator")
READY_WITHIN = 120.0
"""Seconds; after an outage of the API server healthy nodes may count as lost for a minute."""

Object = dict[str, Any]


def wait_until(condition: Callable[[], Any], timeout: float, what: Callable[[], str] | str = "") -> None:
    """Wait for a condition; `what` is shown if it does not become true.

    A query that starts kubectl or ortflow leaves most of the time to the run that it waits for, and a second at most:
    some states are short.
    """
    end = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < end, f"not true within {timeout:g} s: {what() if callable(what) else what}"
        time.sleep(min(max(0.1, 3 * (now - begun)), 1.0))


@dataclass(frozen=True)
class Testbed:
    """A running testbed."""

    __test__ = False
    folder: Path

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment of a user's shell: the kubeconfig, kubectl and helm, and no variables of a run."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ORTFLOW_", "PMI", "OMPI_", "SLURM_"))
        }
        shell = ["bash", "-c", 'source "$0/env"; printf "%s\\n" "$KUBECONFIG" "$PATH"', str(self.folder)]
        config, path = subprocess.run(shell, env=kept, capture_output=True, text=True, check=True).stdout.splitlines()
        return {**kept, "KUBECONFIG": config, "PATH": path, "PYTHONWARNINGS": "default"}

    def ask(
        self, *command: str, given: str | None = None, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as that user; `given` is its standard input."""
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
        return subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=timeout,
            check=False, **source,
        )  # fmt: skip

    def reported(self, *command: str, given: str | None = None, timeout: float = 60) -> str:
        """Output of a command that must succeed."""
        done = self.ask(*command, given=given, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def kubectl(self, *arguments: str, given: str | None = None, timeout: float = 60) -> str:
        """Output of kubectl; it must succeed."""
        return self.reported("kubectl", *arguments, given=given, timeout=timeout)

    def get(self, *arguments: str) -> Object:
        """An object, or a list of them with `items`."""
        found: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    # ---- injected faults

    def node(self, action: str, name: str, *command: str) -> str:
        """Switch a node on or off, cut or heal its cable, or run a command there: see
        tests/testbeds/kubernetes/node."""
        return self._script("node", action, name, *command)

    def service(self, action: str, *names: str) -> None:
        """Start, stop or kill a part of the control plane: see tests/testbeds/kubernetes/service."""
        self._script("service", action, *names)

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Parts of the control plane killed for a while."""
        self.service("kill", *names)
        try:
            yield
        finally:
            self.service("start", *names)

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes, on or off."""
        return sorted(path.name for path in (self.folder / "nodes").iterdir())

    def ready(self, name: str) -> bool:
        """Whether Kubernetes considers the node healthy."""
        done = self.ask("kubectl", "get", "node", name, "-o", "json")
        if done.returncode:
            return False
        conditions = {one["type"]: one["status"] for one in json.loads(done.stdout)["status"]["conditions"]}
        return conditions.get("Ready") == "True"

    def restore(self) -> None:
        """Restore the initial state: everything runs, and nodes are ready and schedulable."""
        self.service("start", *SERVICES)
        for name in self.nodes:
            self.node("on", name)
            self.node("heal", name)
            self.kubectl("uncordon", name)
        wait_until(lambda: all(map(self.ready, self.nodes)), READY_WITHIN, lambda: self.kubectl("get", "nodes"))
        wait_until(self._untainted, 120, lambda: self.kubectl("describe", "nodes"))

    def _untainted(self) -> bool:
        return not any(node["spec"].get("taints") for node in self.get("nodes")["items"])

    def _script(self, name: str, *arguments: str) -> str:
        return self.reported(str(SCRIPTS / name), "--testbed", str(self.folder), *arguments, timeout=180)


@dataclass(frozen=True)
class Space:
    """A namespace for one test."""

    testbed: Testbed
    name: str

    @classmethod
    def make(cls, testbed: Testbed, name: str) -> Space:
        """A new namespace in which pods can be created."""
        testbed.kubectl("create", "namespace", name)
        made = cls(testbed, name)
        wait_until(lambda: testbed.ask("kubectl", "-n", name, "get", "serviceaccount", "default").returncode == 0, 120)
        return made

    def remove(self) -> None:
        """Delete it with its contents, immediately and without waiting for the end."""
        self.testbed.ask("kubectl", "-n", self.name, "delete", "mpijobs,jobs,deployments", "--all", "--wait=false")
        self.testbed.ask(
            "kubectl", "-n", self.name, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false"
        )
        self.testbed.ask("kubectl", "delete", "namespace", self.name, "--wait=false")

    def kubectl(self, *arguments: str, given: str | None = None, timeout: float = 60) -> str:
        """Output of kubectl in this namespace; it must succeed."""
        return self.testbed.kubectl("-n", self.name, *arguments, given=given, timeout=timeout)

    def get(self, *arguments: str) -> Object:
        """An object, or a list of them with `items`."""
        return self.testbed.get("-n", self.name, *arguments)

    def make_all(self, *documents: Object) -> None:
        """Create objects."""
        self.kubectl(
            "create", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
        )

    def claim(self, name: str = "data") -> Path:
        """Create a claim for a volume that all nodes see; its folder on this machine."""
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        self.make_all({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})
        folder = self.volume(name)
        wait_until(lambda: self.get("pvc", name)["status"].get("phase") == "Bound", 120)
        return folder

    def volume(self, claim: str = "data") -> Path:
        """The folder of a claim on this machine."""
        return self.testbed.folder / "volumes" / self.name / claim

    def pods(self, selector: str = "") -> list[Object]:
        """Pods by labels."""
        return list(self.get("pods", *(["-l", selector] if selector else []))["items"])

    def pod(self, name: str) -> Object | None:
        """The pod of that name, or None."""
        done = self.testbed.ask("kubectl", "-n", self.name, "get", "pod", name, "-o", "json")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def phase(self, name: str) -> str:
        """Pending, Running, Succeeded or Failed; empty if there is no such pod."""
        pod = self.pod(name)
        return str(pod["status"].get("phase", "")) if pod else ""

    def until_phase(self, name: str, *phases: str, timeout: float = 120) -> None:
        """Wait until a pod has this phase."""
        wait_until(lambda: self.phase(name) in phases, timeout, self.transcript)

    def condition(self, mpijob: str, kind: str) -> Object | None:
        """The condition of an MPIJob, if it is true."""
        found = self.get("mpijob", mpijob).get("status", {}).get("conditions", [])
        return next((one for one in found if one["type"] == kind and one["status"] == "True"), None)

    def transcript(self, lines: int = 60) -> str:
        """Everything that may explain a failed test."""
        commands = (["get", "mpijobs,jobs,pods,pvc", "-o", "wide"], ["get", "events", "--sort-by=.lastTimestamp"])
        parts = [self.testbed.ask("kubectl", "-n", self.name, *command).stdout for command in commands]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            reported = self.testbed.ask("kubectl", "-n", self.name, "logs", name, "--all-containers", f"--tail={lines}")
            parts.append(f"--- {name}\n{reported.stdout}{reported.stderr}")
        return "\n".join(parts)


def owner(pod: Object) -> str:
    """Node of a pod."""
    return str(pod["spec"].get("nodeName", ""))


def image_pod(
    name: str, command: Sequence[str], *, image: str = "localhost/ortflow:testbed", **container: Any
) -> Object:
    """A pod of the project's image that runs one command, as uid 1000."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "runAsNonRoot": True},
            "containers": [{"name": "main", "image": image, "command": list(command), **container}],
        },
    }
