"""Accidents at random moments, several over one run: the end is that of a run that nobody touched.

pytest -m chaos tests/slurm                    # 20 schedules
ORTFLOW_CHAOS=2 pytest -m chaos tests/slurm    # a short round
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable

import psutil
import pytest
from bed import FINAL
from cluster import Cluster, Run, rank_processes, same_end, slow

pytestmark = pytest.mark.chaos
SCHEDULES = min(20, int(os.environ.get("ORTFLOW_CHAOS", "20")))
EVENTS = 4
PATIENCE = 400.0
"""Seconds from the last event to the end."""
PATIENT = {"failures": 1000, "preemptions": 1000, "backoff": {"first": 0.0, "limit": 0.0}}


class Fate:
    """What happens to a run, one event after the other; each mends what the one before broke."""

    def __init__(self, run: Run, chance: random.Random) -> None:
        self._run, self._bed, self._chance = run, run.bed, chance
        self._mend: list[Callable[[], None]] = []

    def strike(self) -> str:
        """Something happens; what."""
        while self._mend:
            self._mend.pop()()
        name = self._chance.choice(sorted(self.EVENTS))
        return name if self.EVENTS[name](self) else f"{name}: nothing to hit"

    def end(self) -> None:
        """All is mended."""
        while self._mend:
            self._mend.pop()()

    def _hosts(self) -> list[str]:
        job = self._bed.job(self._run.job)
        return self._bed.hosts(self._run.job) if job["JobState"] == "RUNNING" else []

    def _preempt(self, grace: int) -> bool:
        if not self._hosts():
            return False
        self._bed.grace(grace)
        self._bed.preempt(self._run.job, seconds=3)
        return True

    def _requeue(self) -> bool:
        return bool(self._hosts()) and self._bed.ask("scontrol", "requeue", self._run.job).returncode == 0

    def _kill_rank(self) -> bool:
        ranks = rank_processes(self._run.run_dir)
        if not ranks:
            return False
        _kill(ranks[self._chance.choice(sorted(ranks))])
        return True

    def _kill_ranks(self) -> bool:
        ranks = rank_processes(self._run.run_dir)
        for process in ranks.values():
            _kill(process)
        return bool(ranks)

    def _kill_keeper(self) -> bool:
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if words[1:4] == ["-m", "ortflow.launchers.slurm.keeper", str(self._run.run_dir)]:
                _kill(process)
                return True
        return False

    def _node_off(self) -> bool:
        if not (hosts := self._hosts()):
            return False
        host = self._chance.choice(hosts)
        self._bed.node("off", host)
        self._mend.append(lambda: (time.sleep(8), self._bed.node("start", host))[0])
        return True

    def _slurmd_dies(self) -> bool:
        if not (hosts := self._hosts()):
            return False
        host = self._chance.choice(hosts)
        self._bed.node("slurmd-kill", host)
        pause = self._chance.choice([0.0, 25.0])
        self._mend.append(lambda: (time.sleep(pause), self._bed.node("slurmd-start", host))[0])
        return True

    def _controller_dies(self) -> bool:
        self._bed.controller("kill")
        self._mend.append(lambda: self._bed.controller("start"))
        return True

    def _controller_restarts(self) -> bool:
        self._bed.controller("stop")
        self._bed.controller("start")
        return True

    EVENTS = {  # noqa: RUF012
        "preempted, grace 0": lambda self: self._preempt(0),
        "preempted, grace 15": lambda self: self._preempt(15),
        "requeued": _requeue,
        "a rank killed": _kill_rank,
        "all ranks killed": _kill_ranks,
        "the keeper killed": _kill_keeper,
        "a node off": _node_off,
        "a daemon dead": _slurmd_dies,
        "the controller dead": _controller_dies,
        "the controller restarted": _controller_restarts,
    }


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_a_random_schedule(cluster_of: Cluster, undisturbed: Run, number: int) -> None:
    chance = random.Random(number)
    run = cluster_of.submit(f"schedule-{number}", restart=PATIENT, **slow(0.3))
    fate = Fate(run, chance)
    history = []
    for _ in range(EVENTS):
        wait = chance.uniform(1.0, 14.0)
        time.sleep(wait)
        history.append(f"{wait:.1f} s: {fate.strike()}")
    fate.end()
    helped = follow(run, history)
    print(f"schedule {number}: {'; '.join(history)}; helped {helped} times")
    same_end(run, undisturbed)


def follow(run: Run, history: list[str]) -> int:
    """Wait for the good end; what status says that a person has to do is done. How often."""
    helped = 0
    end = time.monotonic() + PATIENCE
    while True:
        how = run.status()
        assert time.monotonic() < end, f"{history}\n{how}\n{run.story()}"
        if how["state"] == "finished":
            break
        if told := re.search(r"`(scontrol release \d+)`", how["waits"] or ""):
            # A daemon that came back with the job's old processes: Slurm holds the job until somebody looks.
            helped += 1
            run.bed.told(*told[1].split())
        elif how["state"] in ("lost", "failed") and not how["waits"]:
            helped += 1
            done = run.cluster.ortflow("resume", run.name, "--detach")
            assert done.returncode == 0 or "in Slurm" in done.stderr, f"{history}\n{done.stderr}\n{run.story()}"
        assert helped <= EVENTS, f"{history}\n{how}\n{run.story()}"
        time.sleep(1.0)
    while run.bed.state(run.job) not in FINAL:
        assert time.monotonic() < end, f"{history}\n{run.story()}"
        time.sleep(1.0)
    return helped
