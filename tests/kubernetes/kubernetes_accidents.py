"""Accidents that befall a run on a testbed, one after the other.

This class knows what it has done, so it knows more than any one place in the cluster: `kubernetes_truth` holds what
`ortflow status` says against that, `kubernetes_may` what the run's record says.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from kubernetes_cluster import MOUNT, Cluster, Run
from kubernetes_disk import SmallDisk
from kubernetes_may import unexplained
from kubernetes_runs_seen import rank_processes, supervisor_processes
from kubernetes_testbed import Object, wait_until

SETTLE = 25.0
"""Seconds in which what was done reaches everybody who has a say in it: pods, logs, a lease, the operator."""
NOTICED = 60.0
"""Seconds in which `status` names what keeps a run from going on."""
NOTHING = "nothing to hit"
"""What came of an accident for which there was no pod or rank."""
QUOTA: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-pods"}}


class Accidents:
    """What happens to a run; each event mends what the one before broke."""

    def __init__(self, run: Run, number: int, disk: SmallDisk | None, clocks: Path | None) -> None:
        self._run, self._testbed, self._number, self._clocks = run, run.space.testbed, number, clocks
        self._chance = random.Random(number)
        self._mend: list[Callable[[], object]] = []
        self.disk = disk
        self.struck: list[str] = []
        """What was done."""
        self.now: str = ""
        """What is broken."""
        self.since = time.monotonic()
        """When something was last broken or mended."""
        self.api_back = float("-inf")
        """When the API server was last started again."""
        self.look: Callable[[], dict[str, Any]] = run.status
        """What `ortflow status` says, held against the truth."""

    def strike(self, name: str) -> str:
        """It happens; what came of it."""
        self.mend()
        # Draws of its own: whether an event hits does not change those that follow.
        self._chance = random.Random(f"{self._number} {len(self.struck)} {name}")
        # Before it is known whether it hits: it may do so half way.
        self.struck.append(name)
        self.now, self.since = name, time.monotonic()
        hit = self.EVENTS[name](self)
        if not hit:
            self.struck.pop()
        self.now, self.since = name if hit else "", time.monotonic()
        return name if hit else f"{name}: {NOTHING}"

    def reckon(self) -> None:
        """At the end: every attempt ended by something that was done, and harmless things have left no trace."""
        wrong = unexplained(self.struck, self._run.records("end"))
        assert not wrong, f"{wrong}\n{self.struck}\n{self._run.transcript()}"

    def mend(self) -> None:
        """All is as it should be."""
        while self._mend:
            self._mend.pop()()
            self.since = time.monotonic()
        self.now = ""

    @property
    def settled(self) -> bool:
        """Whether everybody has had the time to notice."""
        return time.monotonic() > self.since + SETTLE

    def _pod(self, component: str) -> str | None:
        pods = [pod for pod in self._run.pods(component) if pod["status"].get("phase") == "Running"]
        return str(self._chance.choice(pods)["metadata"]["name"]) if pods else None

    def _delete(self, component: str, *how: str) -> bool:
        name = self._pod(component)
        return name is not None and self._kubectl("delete", "pod", name, "--wait=false", *how)

    def _kubectl(self, *words: str) -> bool:
        return self._testbed.ask("kubectl", "-n", self._run.space.name, *words).returncode == 0

    def _evict(self) -> bool:
        if (pod := self._pod("worker")) is None:
            return False
        path = f"/api/v1/namespaces/{self._run.space.name}/pods/{pod}/eviction"
        meta = {"name": pod, "namespace": self._run.space.name}
        asked = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
        return self._testbed.ask("kubectl", "create", "--raw", path, "-f", "-", given=asked).returncode == 0

    def _drain(self) -> bool:
        node = self._chance.choice(self._testbed.nodes)
        self._mend.append(lambda: self._testbed.kubectl("uncordon", node))
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
        return self._testbed.ask("kubectl", *drain, timeout=90).returncode == 0

    def _cut(self) -> bool:
        node = self._chance.choice(self._testbed.nodes)
        self._testbed.node("cut", node)
        self._mend.append(lambda: self._testbed.node("heal", node))
        return True

    def _off(self) -> bool:
        node = self._chance.choice(self._testbed.nodes)
        self._testbed.node("off", node)
        self._mend.append(lambda: self._testbed.node("on", node))
        return True

    def _signal(self, number: str, *, whole: bool) -> bool:
        ranks = rank_processes(self._run)
        chosen = sorted(ranks) if whole else [self._chance.choice(sorted(ranks))] if ranks else []
        for rank in chosen:
            with suppress(psutil.NoSuchProcess):
                getattr(ranks[rank], number)()
        return bool(chosen)

    def _kill_run_supervisor(self) -> bool:
        found = supervisor_processes(self._run)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(found)

    def _suspend(self) -> bool:
        name = self._run.job()["metadata"]["name"]
        if self._run.over():
            return False
        patch = json.dumps({"spec": {"runPolicy": {"suspend": True}}})
        self._mend.append(self._resume)
        return self._kubectl("patch", "mpijob", name, "--type=merge", "-p", patch)

    def _resume(self) -> None:
        done = self._run.cluster.ortflow("resume", self._run.name)
        assert done.returncode == 0 or "finished" in self._run.outcomes(), done.stderr

    def _away(self, service: str) -> bool:
        self._testbed.service("kill", service)

        def back() -> None:
            # The operator gives up when it cannot renew its lease.
            self._testbed.service("start", service, "operator")
            if service == "apiserver":
                self.api_back = time.monotonic()

        self._mend.append(back)
        return True

    def _fill(self) -> bool:
        """To the last byte; `status` says so once ranks have to save."""
        disk = self.disk
        if disk is None or not self._works():
            return False
        self._mend.append(disk.free)
        starts = len(self._run.records("start"))

        def reported() -> bool:
            disk.fill()  # ranks that were saving make room by letting older checkpoints go
            how = self.look()
            undisturbed = self._works() and len(self._run.records("start")) == starts
            return not undisturbed or how["state"] == "finished" or "out of disk on" in str(how["waits"])

        wait_until(reported, NOTICED, lambda: f"the disk is full, and nothing says so\n{self._run.transcript()}")
        return True

    def _works(self) -> bool:
        return len(rank_processes(self._run)) == 4 and self._run.steps() > 0

    def _set_clock(self) -> bool:
        """For good: nobody sets it right again."""
        if self._clocks is None or (pod := self._pod(self._chance.choice(["worker", "launcher"]))) is None:
            return False
        # A launcher pod's host has the name of its batch Job.
        host = pod.rpartition("-")[0] if "-launcher-" in pod else pod
        (self._clocks / host).write_text(str(self._chance.choice([-7200, -300, 300, 7200])))
        return True

    def _load(self) -> bool:
        burn = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]

        def over() -> None:
            for process in burn:
                process.kill()
                process.wait()

        self._mend.append(over)
        return True

    def _second(self) -> bool:
        """The same file, applied: another MPIJob on the same directory."""
        if self._run.over():
            return False
        text = self._run.cluster.ortflow("render", "-b", "kubernetes", f"{self._run.name}.yaml").stdout
        space = self._run.space
        made = self._testbed.ask("kubectl", "-n", space.name, "apply", "-f", "-", given=text)
        self._mend.append(
            lambda: self._testbed.ask("kubectl", "-n", space.name, "delete", "--wait=false", "-f", "-", given=text)
        )
        return made.returncode == 0

    def _by_hand(self) -> bool:
        """Another MPIJob of a file that a person has changed, on the same directory: it leaves with a sentence."""
        if not self._works():
            return False
        run, space = self._run, self._run.space
        first = run.job()["metadata"]["name"]
        text = run.cluster.ortflow("render", "-b", "kubernetes", f"{run.name}.yaml").stdout
        document = next(one for one in yaml.safe_load_all(text) if one["kind"] == "MPIJob")
        second = f"{run.name}-byhand"
        file = run.cluster.folder / "by-hand.yaml"
        file.write_text(text.replace(document["metadata"]["name"], second))
        self._mend.append(lambda: self._kubectl("delete", "--wait=false", "-f", str(file)))
        space.kubectl("create", "-f", str(file))

        def reported() -> str:
            pods = space.pods(f"ortflow.dev/job={second},ortflow.dev/component=launcher")
            found = [
                self._testbed.ask("kubectl", "-n", space.name, "logs", pod["metadata"]["name"]).stdout for pod in pods
            ]
            return found[0] if found else ""

        states: set[str] = set()

        def left() -> bool:
            states.add(self.look()["state"])
            return states != {"running"} or "is in use by the MPIJob" in reported()

        wait_until(left, 2 * NOTICED, run.transcript)
        if states == {"running"}:
            assert f"is in use by the MPIJob {first}" in reported(), run.transcript()
        if states <= {"running", "finished"}:
            assert not any(record.get("job") == second for record in run.records("submit")), run.transcript()
        return True

    def _quota(self) -> bool:
        """No pod can be made any more; those that are there stay."""
        space = self._run.space
        space.kubectl("create", "-f", "-", given=json.dumps({**QUOTA, "spec": {"hard": {"pods": "0"}}}))
        self._mend.append(lambda: space.kubectl("delete", "resourcequota", "no-pods"))
        # It holds from when the controller has counted what there is.
        wait_until(
            lambda: space.get("resourcequota", "no-pods").get("status", {}).get("hard"), NOTICED, space.transcript
        )
        return True

    def _quota_and_worker(self) -> bool:
        """The operator cannot replace a worker, and `status` says why."""
        if not self._works() or not self._quota() or not self._delete("worker"):
            return False

        def reported() -> bool:
            how = self.look()
            return how["state"] == "finished" or "exceeded quota" in str(how["waits"])

        wait_until(reported, NOTICED, lambda: f"a quota is spent, and nothing says so\n{self._run.transcript()}")
        return True

    def _cut_deadline(self) -> bool:
        """As if the run had been given less time; a person has it go on."""
        name = f"{self._run.job()['metadata']['name']}-launcher"
        found = self._testbed.ask("kubectl", "-n", self._run.space.name, "get", "job", name, "-o", "json")
        begun = json.loads(found.stdout).get("status", {}).get("startTime") if found.returncode == 0 else None
        if begun is None or self._run.over():
            return False
        age = time.time() - datetime.fromisoformat(begun.replace("Z", "+00:00")).timestamp()
        change = {"spec": {"activeDeadlineSeconds": max(1, int(age)) + self._chance.choice([1, 6])}}
        self._mend.append(self._past_deadline)
        return self._kubectl("patch", "job", name, "--type=merge", "-p", json.dumps(change))

    def _past_deadline(self) -> None:
        wait_until(self._run.over, NOTICED, self._run.transcript)
        if "finished" not in self._run.outcomes():
            self._resume()

    EVENTS: dict[str, Callable[[Accidents], bool]] = {  # noqa: RUF012
        "the launcher pod deleted": lambda self: self._delete("launcher"),
        "the launcher pod killed": lambda self: self._delete("launcher", "--force", "--grace-period=0"),
        "a worker pod deleted": lambda self: self._delete("worker"),
        "a worker pod killed": lambda self: self._delete("worker", "--force", "--grace-period=0"),
        "a worker evicted": _evict,
        "a node drained": _drain,
        "a node off": _off,
        "a cable out": _cut,
        "a rank killed": lambda self: self._signal("kill", whole=False),
        "all ranks killed": lambda self: self._signal("kill", whole=True),
        "a rank told to end": lambda self: self._signal("terminate", whole=False),
        "all ranks told to end": lambda self: self._signal("terminate", whole=True),
        "the supervisor process killed": _kill_run_supervisor,
        "suspended": _suspend,
        "the API server away": lambda self: self._away("apiserver"),
        "the operator away": lambda self: self._away("operator"),
        "the scheduler away": lambda self: self._away("scheduler"),
        "the disk full": _fill,
        "a clock set": _set_clock,
        "a heavy load": _load,
        "applied a second time": _second,
        "rendered by hand": _by_hand,
        "a quota": _quota,
        "a worker deleted under a quota": _quota_and_worker,
        "the deadline cut": _cut_deadline,
    }


FAULTS = Path(__file__).parent.parent / "support" / "faults"


def clocks_of(cluster: Cluster) -> tuple[Path, dict[str, str]]:
    """A folder whose files set the clocks of pods, and the variables by which they follow them."""
    folder = cluster.volume / "clocks"
    folder.mkdir()
    folder.chmod(0o755)
    return folder, {"CLOCKS": f"{MOUNT}/clocks"}
