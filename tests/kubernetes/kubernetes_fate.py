"""Accidents that befall a run on a bed, one after the other, and what `ortflow status` may say meanwhile.

A Fate knows what it has done, so it knows more than any one place in the cluster; `Truth` keeps what it needs of the
volume and the processes beside that, and holds each status against both.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from kubernetes_cluster import MOUNT, Cluster, Run
from kubernetes_disk import SmallDisk
from kubernetes_runs_seen import keepers, rank_processes

SETTLE = 25.0
"""Seconds in which what was done reaches everybody who has a say in it: pods, logs, a lease, the operator."""
TOLD = 10.0
"""Seconds in which what a run's launcher pod has seen is in its log, and from there in the record directory."""
NOTHING = "nothing to hit"
"""What came of an accident for which there was no pod or rank."""
TAKEN = frozenset({"pending", "running", "restarting"})
"""States of a run that somebody is at work on, or will be."""


@dataclass(frozen=True)
class Seen:
    """What is so, at a moment: read from the volume and this machine's processes."""

    at: float
    starts: int
    steps: int
    finished: bool
    lack: bool
    """The run itself says that its disk is full."""
    ranks: int
    """That are at work."""
    kept: bool
    """A launcher pod's process is there, which tells of them."""

    @classmethod
    def of(cls, run: Run) -> Seen:
        """Now."""
        return cls(
            time.monotonic(), len(run.records("start")), run.steps(), "finished" in run.outcomes(), _lacks(run),
            len(rank_processes(run)), bool(keepers(run)),
        )  # fmt: skip


def _lacks(run: Run) -> bool:
    try:
        return (run.run_dir / ".heartbeat").read_text().strip().startswith("{")
    except OSError:
        return False


class Fate:
    """What happens to a run; each event mends what the one before broke."""

    def __init__(self, run: Run, chance: random.Random, disk: SmallDisk | None, clocks: Path | None) -> None:
        self._run, self._bed, self._chance, self._disk, self._clocks = run, run.space.bed, chance, disk, clocks
        self._mend: list[Callable[[], object]] = []
        self.now: str = ""
        """What is broken."""
        self.since = time.monotonic()
        """When something was last broken or mended."""
        self.api_back = float("-inf")
        """When the API server was last started again."""
        self.faults = 0
        """How many attempts may have failed by what was done: no preemption, and no lost place."""

    def strike(self, name: str) -> str:
        """It happens; what came of it."""
        self.mend()
        hit = self.EVENTS[name](self)
        self.now, self.since = name if hit else "", time.monotonic()
        return name if hit else f"{name}: {NOTHING}"

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
        return self._bed.ask("kubectl", "-n", self._run.space.name, *words).returncode == 0

    def _evict(self) -> bool:
        if (pod := self._pod("worker")) is None:
            return False
        path = f"/api/v1/namespaces/{self._run.space.name}/pods/{pod}/eviction"
        meta = {"name": pod, "namespace": self._run.space.name}
        asked = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
        return self._bed.ask("kubectl", "create", "--raw", path, "-f", "-", given=asked).returncode == 0

    def _drain(self) -> bool:
        node = self._chance.choice(self._bed.nodes)
        self._mend.append(lambda: self._bed.kubectl("uncordon", node))
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
        return self._bed.ask("kubectl", *drain, timeout=90).returncode == 0

    def _cut(self) -> bool:
        node = self._chance.choice(self._bed.nodes)
        # MPI may lose a message when a connection breaks, and wait for it until the attempt counts as hung.
        self.faults += 1
        self._bed.node("cut", node)
        self._mend.append(lambda: self._bed.node("heal", node))
        return True

    def _off(self) -> bool:
        node = self._chance.choice(self._bed.nodes)
        self._bed.node("off", node)
        self._mend.append(lambda: self._bed.node("on", node))
        return True

    def _signal(self, number: str, *, whole: bool) -> bool:
        ranks = rank_processes(self._run)
        chosen = sorted(ranks) if whole else [self._chance.choice(sorted(ranks))] if ranks else []
        self.faults += bool(chosen)
        for rank in chosen:
            with suppress(psutil.NoSuchProcess):
                getattr(ranks[rank], number)()
        return bool(chosen)

    def _kill_keeper(self) -> bool:
        found = keepers(self._run)
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
        assert done.returncode == 0 or Seen.of(self._run).finished, done.stderr

    def _away(self, service: str) -> bool:
        self._bed.service("kill", service)

        def back() -> None:
            # The operator gives up when it cannot renew its lease.
            self._bed.service("start", service, "operator")
            if service == "apiserver":
                self.api_back = time.monotonic()

        self._mend.append(back)
        return True

    def _fill(self) -> bool:
        if self._disk is None:
            return False
        self._mend.append(self._disk.free)
        # Ranks that are just starting cannot wait.
        self.faults += 1
        self._disk.fill()
        return True

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
        made = self._bed.ask("kubectl", "-n", space.name, "apply", "-f", "-", given=text)
        self._mend.append(
            lambda: self._bed.ask("kubectl", "-n", space.name, "delete", "--wait=false", "-f", "-", given=text)
        )
        return made.returncode == 0

    EVENTS: dict[str, Callable[[Fate], bool]] = {  # noqa: RUF012
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
        "the keeper killed": _kill_keeper,
        "suspended": _suspend,
        "the API server away": lambda self: self._away("apiserver"),
        "the operator away": lambda self: self._away("operator"),
        "the scheduler away": lambda self: self._away("scheduler"),
        "the disk full": _fill,
        "a clock set": _set_clock,
        "a heavy load": _load,
        "applied a second time": _second,
    }


class Truth:
    """Holds what `ortflow status` says against what is so."""

    def __init__(self, run: Run, fate: Fate, client_ahead: float) -> None:
        self.run, self._fate, self._ahead = run, fate, client_ahead
        self._begun = time.monotonic()
        self._window: deque[Seen] = deque()
        self._most = 0
        self.told: deque[str] = deque(maxlen=40)
        """The last looks, for people."""
        self.looks = 0

    def look(self) -> dict[str, Any]:
        """What status says; AssertionError where it is not so."""
        self._see()
        done = self.run.cluster.ortflow(
            "status", self.run.name, "--json", PYTHONPATH=str(ILL), SKEW=f"ortflow {self._ahead}"
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.story()}"
        how: dict[str, Any] = json.loads(done.stdout)
        self._see()
        self.looks += 1
        now = self._window[-1]
        self.told.append(
            f"{now.at - self._begun:6.1f} s [{self._fate.now}] {how['state']} "
            f"attempts {how['attempts']} step {how['step']}: "
            f"waits {how['waits']}, last {how['cause']} ({now})"
        )
        for wrong in self._wrong(how):
            raise AssertionError(f"{wrong}\n{json.dumps(how)}\n{self.story()}")
        return how

    def _see(self) -> None:
        self._window.append(Seen.of(self.run))
        self._most = max(self._most, self._window[-1].steps)
        while self._window[0].at < self._window[-1].at - SETTLE:
            self._window.popleft()

    def _wrong(self, how: dict[str, Any]) -> list[str]:
        """What it says that is not so, and what it leaves out."""
        state, waits, broken = how["state"], str(how["waits"] or ""), self._fate.now
        window, now = list(self._window), self._window[-1]
        long = now.at > window[0].at + SETTLE / 2
        recent = [one for one in window if one.at >= now.at - TOLD]
        told = recent[-1].at > recent[0].at + TOLD / 2 and all(one.kept for one in recent)
        found = []
        if state == "finished":
            found += [] if now.finished else ["finished, it says, and it is not"]
            return found
        if state not in TAKEN and not self._given_up(state):
            found.append(f"{state}, it says, and it goes on")
        if how["step"] > self._most:
            found.append(f"step {how['step']}, it says, and none has come so far")
        if how["attempts"] > now.starts:
            found.append(f"{how['attempts']} attempts, it says, and there were {now.starts}")
        away, told_away = broken == "the API server away", waits.startswith("the API server ")
        if away != told_away and (away or now.at > self._fate.api_back + SETTLE):
            found.append(f"the API server {'is' if away else 'is not'} away, and it says: {waits}")
        unheard = "of the launcher pod does not answer" in waits
        if unheard and broken not in ("a node off", "a cable out") and self._fate.settled:
            found.append(f"no node is away, and it says: {waits}")
        if away or told_away or unheard:
            return found
        if (broken == "suspended") != ("is suspended" in waits):
            found.append(f"suspended it {'is' if broken == 'suspended' else 'is not'}, and it says: {waits}")
        lacks = {one.lack for one in recent}
        if (
            told
            and len(lacks) == 1
            and lacks != {"out of disk" in waits}
            and not waits.startswith(("worker", "waiting"))
        ):
            found.append(f"out of disk it {'is' if now.lack else 'is not'}, and it says: {waits}")
        # An attempt that has just begun has no rank yet.
        attempt = [one for one in window if one.starts == now.starts]
        without = now.at > attempt[0].at + SETTLE / 2 and not any(one.ranks for one in attempt)
        if state == "running" and without and "workers are ready" not in waits:
            found.append("running, it says, and for long there was no rank")
        if not (self._fate.settled and long):
            return found
        if state == "running":
            if how["attempts"] < window[0].starts or how["step"] < min(one.steps for one in window):
                found.append("what it says is old")
        elif all(one.ranks == 4 and one.starts == now.starts for one in window) and now.steps > window[0].steps:
            found.append(f"{state}, it says, and it makes steps")
        return found

    def _given_up(self, state: str) -> bool:
        """Whether the operator has done what a person has to answer with `ortflow resume`."""
        return state == "lost" and self.run.over()

    def story(self) -> str:
        """The last looks."""
        return "\n".join(self.told)


ILL = Path(__file__).parent.parent / "support" / "ill"


def clocks_of(cluster: Cluster) -> tuple[Path, dict[str, str]]:
    """A folder whose files set the clocks of pods, and the variables by which they follow them."""
    folder = cluster.volume / "clocks"
    folder.mkdir()
    folder.chmod(0o755)
    return folder, {"CLOCKS": f"{MOUNT}/clocks"}
