"""Whether `ortflow status` says what is so, of a run to which accidents happen (`kubernetes_accidents`).

What is so comes from what was done, from the volume, its file system and this machine's processes; of the run's own
words only the numbers of its attempts and steps.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from kubernetes_accidents import FAULTS, SETTLE, Accidents
from kubernetes_cluster import Run
from kubernetes_may import too_many
from kubernetes_runs_seen import rank_processes, supervisor_processes

TOLD = 10.0
"""Seconds in which what a run's launcher pod has seen is in its log, and from there in the record directory."""
TAKEN = frozenset({"pending", "running", "restarting"})
"""States of a run that somebody is at work on, or will be."""
LACK = re.compile(r"out of disk on \S+, ([\d.,]+) MB needed")


def needed(lack: re.Match[str]) -> float:
    """Bytes, with something for rounding."""
    return (float(lack[1].replace(",", "")) + 0.1) * 1e6


@dataclass(frozen=True)
class Seen:
    """What is so, at a moment: read from the volume and this machine's processes."""

    at: float
    starts: int
    steps: int
    finished: bool
    room: int
    """Bytes that can be written on its disk."""
    ranks: int
    """That are at work."""
    kept: bool
    """A launcher pod's process is there, which tells of them."""

    @classmethod
    def of(cls, run: Run) -> Seen:
        """Now."""
        return cls(
            time.monotonic(), len(run.records("start")), run.steps(), "finished" in run.outcomes(),
            shutil.disk_usage(run.cluster.volume).free, len(rank_processes(run)), bool(supervisor_processes(run)),
        )  # fmt: skip


class Truth:
    """Holds what `ortflow status` says against what is so."""

    def __init__(self, run: Run, accidents: Accidents, client_ahead: float) -> None:
        self.run, self._accidents, self._ahead = run, accidents, client_ahead
        self._begun = time.monotonic()
        self._window: deque[Seen] = deque()
        self._most = 0
        accidents.look = self.look
        self.reported: deque[str] = deque(maxlen=40)
        """The last looks, for people."""
        self.looks = 0

    def look(self) -> dict[str, Any]:
        """What status says; AssertionError where it is not so."""
        self._see()
        done = self.run.cluster.ortflow(
            "status", self.run.name, "--json", PYTHONPATH=str(FAULTS), SKEW=f"ortflow {self._ahead}"
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.transcript()}"
        how: dict[str, Any] = json.loads(done.stdout)
        self._see()
        self.looks += 1
        now = self._window[-1]
        self.reported.append(
            f"{now.at - self._begun:6.1f} s [{self._accidents.now}] {how['state']} "
            f"attempts {how['attempts']} step {how['step']}: "
            f"waits {how['waits']}, last {how['cause']} ({now})"
        )
        for wrong in self._wrong(how):
            raise AssertionError(f"{wrong}\n{json.dumps(how)}\n{self.transcript()}")
        return how

    def _see(self) -> None:
        self._window.append(Seen.of(self.run))
        self._most = max(self._most, self._window[-1].steps)
        while self._window[0].at < self._window[-1].at - SETTLE:
            self._window.popleft()

    def _wrong(self, how: dict[str, Any]) -> list[str]:
        """What it says that is not so, and what it leaves out."""
        state, waits, broken = how["state"], str(how["waits"] or ""), self._accidents.now
        window, now = list(self._window), self._window[-1]
        long = now.at > window[0].at + SETTLE / 2
        recent = [one for one in window if one.at >= now.at - TOLD]
        reported = recent[-1].at > recent[0].at + TOLD / 2 and all(one.kept for one in recent)
        found = too_many(self._accidents.struck, how)
        if state == "finished":
            found += [] if now.finished else ["finished, it says, and it is not"]
            return found
        if state not in TAKEN and not self._given_up(state):
            found.append(f"{state}, it says, and it goes on")
        if how["step"] > self._most:
            found.append(f"step {how['step']}, it says, and none has come so far")
        if how["attempts"] > now.starts:
            found.append(f"{how['attempts']} attempts, it says, and there were {now.starts}")
        away, reported_away = broken == "the API server away", waits.startswith("the API server ")
        if away != reported_away and (away or now.at > self._accidents.api_back + SETTLE):
            found.append(f"the API server {'is' if away else 'is not'} away, and it says: {waits}")
        unheard = "of the launcher pod does not answer" in waits
        if unheard and broken not in ("a node off", "a cable out") and self._accidents.settled:
            found.append(f"no node is away, and it says: {waits}")
        if away or reported_away or unheard:
            return found
        if (broken == "suspended") != ("is suspended" in waits):
            found.append(f"suspended it {'is' if broken == 'suspended' else 'is not'}, and it says: {waits}")
        if reported and (lack := LACK.search(waits)) and all(one.room > needed(lack) for one in recent):
            found.append(f"there is room, and it says: {waits}")
        # An attempt that has just begun has no rank yet.
        attempt = [one for one in window if one.starts == now.starts]
        without = now.at > attempt[0].at + SETTLE / 2 and not any(one.ranks for one in attempt)
        if state == "running" and without and "workers are ready" not in waits:
            found.append("running, it says, and for long there was no rank")
        if not (self._accidents.settled and long):
            return found
        if state == "running":
            if how["attempts"] < window[0].starts or how["step"] < min(one.steps for one in window):
                found.append("what it says is old")
        elif all(one.ranks == 4 and one.starts == now.starts for one in window) and now.steps > window[0].steps:
            found.append(f"{state}, it says, and it makes steps")
        return found

    def _given_up(self, state: str) -> bool:
        """Whether it has ended in a way that a person has to answer with `ortflow resume`."""
        return state in ("lost", "preempted") and self.run.over()

    def transcript(self) -> str:
        """The last looks."""
        return "\n".join(self.reported)
