"""What happens to a run in a schedule of accidents, and whether `status` tells it as it was."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from cluster import Run, rank_processes
from full_disks import fill
from testbed import FINAL, wait_until

NOTICED = 12.0
"""Seconds until a run on a full disk has come to where it has to write a checkpoint, and has said what it lacks."""

LOAD, LOAD_SECONDS = 50, 10.0
"""Busy processes, and for how many seconds."""

MISSED = 90.0
"""Seconds until Slurm marks a node DOWN that is off, on two busy cores."""


@dataclass(frozen=True)
class May:
    """What an accident may leave in the record, at most."""

    failures: int = 0
    preemptions: int = 0
    ends: str = ""
    """Causes of attempts that ended: a pattern for OUTCOME: CAUSE."""
    most: int = 1
    """How many attempts may end so."""


SIGKILL = r"failure: rank \d+ was killed by SIGKILL"
PREEMPTED = r"preempted: saved and stopped"
# A signal that comes while ranks start finds nothing to save.
EARLY = r"preempted: (asked to stop before all ranks had started|rank \d+ was ended by SIG\w+)"
BY_HAND = r"(: a signal was sent (to a rank, )?by hand)"
REQUEUED = r"(: a user requeued the job)?"
NODE = r"(: a node of the job was lost)?"
STEP = r"failure: the job's step \S+ was cancelled"
LIMIT = r": the time limit is near"
LOST = r"lost: Slurm ended the job before its cause was recorded"
NODE_LOST = r"lost: node \S+ (was lost|did not answer)"
AWAY = r"lost: the Slurm controller (did not answer when the ranks were started|has lost the job's state)"
MAY: dict[str, May] = {
    "preempted, grace 0": May(preemptions=1, ends=f"{PREEMPTED}$|{EARLY}|{LOST}"),
    "preempted, grace 15": May(preemptions=1, ends=f"{PREEMPTED}$|{EARLY}|{LOST}"),
    "requeued": May(ends=f"{PREEMPTED}{REQUEUED}$|{EARLY}|{LOST}"),
    "a rank killed": May(failures=1, ends=SIGKILL),
    "all ranks killed": May(failures=1, ends=SIGKILL),
    "the supervisor process killed": May(ends=LOST),
    "the batch script killed": May(ends=LOST),
    "the step cancelled": May(
        failures=1, ends=rf"failure: the job's step \S+ was cancelled|{PREEMPTED}{BY_HAND}|{EARLY}"
    ),
    "USR2 by hand": May(ends=f"{PREEMPTED}{BY_HAND}|{EARLY}"),
    "a node off": May(ends=f"{LOST}|{NODE_LOST}|{PREEMPTED}{NODE}$"),
    "a daemon dead": May(ends=f"{LOST}|{NODE_LOST}|{PREEMPTED}{NODE}$"),
    # A controller that dies within 5 s of a start has not written it down, and starts the job again.
    "the controller dead": May(ends=f"{AWAY}|{LOST}"),
    "the controller restarted": May(ends=f"{AWAY}|{LOST}"),
    # In each start of the job, until the limit is mended.
    "the time limit cut": May(ends=f"{PREEMPTED}{LIMIT}", most=4),
    "the time limit raised": May(),
    # An attempt that begins on a full disk ends, and the next one waits for room.
    "the disk full": May(failures=1, ends=r"failure: out of disk on"),
    "a clock shifted": May(),
    "load": May(),
    "submitted again": May(),
    "rendered by hand": May(),
}
"""Accident -> what it may leave; what has no more than `May()` must leave no trace at all."""


@dataclass(frozen=True)
class Sight:
    """The run without ortflow: Slurm's word for its job, and rank 0's newest step."""

    job: str
    state: str | None
    """None where the controller is away."""
    restarts: int
    step: int
    attempts: int


class Accidents:
    """What happens to a run, one event after the other; each mends what the one before broke."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._testbed, self._folder = run, run.testbed, folder
        self._chance = random.Random()
        self._mend: list[Callable[[], object]] = []
        self._struck: list[str] = []
        self._full_since: float | None = None
        self.history: list[str] = []
        self.looks = 0

    def strike(self, name: str, chance: random.Random) -> bool:
        """It happens, with chances of its own; whether there was something to hit."""
        self._chance = chance
        # Before it is known whether it hits: it may do so half way.
        self._struck.append(name)
        hit = self.EVENTS[name](self)
        if not hit:
            self._struck.pop()
        return hit

    def end(self) -> None:
        """All is mended."""
        while self._mend:
            self._mend.pop()()

    def resumed(self) -> None:
        """A person has had the run go on: its budgets are new."""
        self.history.append("resumed")

    # ---- what is so, and what status says

    def look(self) -> dict[str, Any]:
        """Ask for the status and compare; what it says."""
        before = self._sight()
        how = self._run.status()
        after = self._sight()
        self.looks += 1
        wrong = [*self._against_slurm(how, before, after), *self._against_events(how, before, after)]
        assert not wrong, f"{wrong}\n{self.history} {self._struck}\n{before}\n{after}\n{how}\n{self._run.transcript()}"
        return how

    def _sight(self) -> Sight:
        job = self._run.job
        reported = self._testbed.ask("squeue", "-h", "--states=all", "-j", job, "-O", "State:20,RestartCnt:8")
        words = reported.stdout.split() if reported.returncode == 0 else []
        known = (words[0], int(words[1])) if len(words) == 2 else (None, 0)
        starts = len(self._run.records("start"))
        return Sight(job, known[0], known[1], self._newest_step(), starts)

    def _newest_step(self) -> int:
        try:
            lines = (self._run.run_dir / "events/rank-0000.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        steps = re.findall(r'"event": ?"step".*?"step": ?(\d+)', "\n".join(lines[-12:]))
        return int(steps[-1]) if steps else -1

    def _against_slurm(self, how: dict[str, Any], before: Sight, after: Sight) -> list[str]:
        """Where both looks at Slurm are alike, it was so in between."""
        wrong = []
        same = (before.state, before.restarts, before.job) == (after.state, after.restarts, after.job)
        state, waits = how["state"], how["waits"] or ""
        if state in ("cancelled", "stopped", "failed"):
            wrong.append(f"nobody has done that: {state}")
        if not same:
            return wrong
        if before.state is None and state != "finished" and self._testbed.ask("scontrol", "ping").returncode:
            if "does not answer" not in waits:
                wrong.append("the controller is away, and nothing says so")
            if state == "lost":
                wrong.append("lost, because the controller is away")
        if before.state is not None and how["job"] != before.job:
            wrong.append(f"another job than {before.job}")
        # A controller that died before it had stored a start queues the job of a finished run again; `status` of a
        # finished run does not wait for a busy controller.
        waiting = before.state == "PENDING" and state != "finished"
        if waiting and (state not in ("pending", "restarting") or not waits):
            wrong.append("its job waits, and why")
        if waiting and how["job_restarts"] != before.restarts:
            wrong.append(f"started again {before.restarts} times")
        if before.state == "RUNNING" and state in ("lost", "preempted"):
            wrong.append("its job runs")
        if state == "finished" and not re.search(r'"finished"', (self._run.run_dir / "attempts.jsonl").read_text()):
            wrong.append("it has not finished")
        return wrong

    def _against_events(self, how: dict[str, Any], before: Sight, after: Sight) -> list[str]:
        wrong = []
        may = may_of(self._struck)
        for key, most in (("failures", sum(m.failures for m in may)), ("preemptions", sum(m.preemptions for m in may))):
            if how[key] > most:
                wrong.append(f"{how[key]} {key}, and at most {most} accidents of that kind")
        if not before.attempts <= how["attempts"] <= after.attempts:
            wrong.append(f"{before.attempts} to {after.attempts} attempts")
        if before.attempts == after.attempts and -1 not in (before.step, after.step):
            low, high = sorted((before.step, after.step))
            if after.step < before.step:
                # The ranks have gone back to their checkpoint in between.
                low = min(low, how["checkpoint"] or 0)
            if not low <= how["step"] <= high:
                wrong.append(f"step {before.step} to {after.step}")
        lacks = "out of disk on" in (how["waits"] or "")
        if lacks and self._full_since is None:
            # The notice is taken away with the next heartbeat of ranks that have room.
            time.sleep(NOTICED)
            if self._full_since is None and "out of disk on" in (self._run.status()["waits"] or ""):
                wrong.append("the disk is not full")
        return wrong

    def reckon(self) -> None:
        """At the end: every attempt ended by something that was done, and harmless things have left no trace."""
        reported = [f"{end['outcome']}: {end.get('cause') or ''}" for end in self._run.records("end")]
        places = [may.ends for may in may_of(self._struck) for _ in range(may.most) if may.ends]
        lacking = unexplained([words for words in reported if not words.startswith("finished")], places)
        assert not lacking, f"{lacking} of {reported}\n{self.history}\n{self._run.transcript()}"
        if not places:
            assert self._run.outcomes() == ["finished"], f"{self.history}\n{self._run.transcript()}"
            assert self._testbed.job(self._run.job)["Restarts"] == "0", self.history

    # ---- accidents

    def _hosts(self) -> list[str]:
        job = self._testbed.job(self._run.job)
        return self._testbed.hosts(self._run.job) if job["JobState"] == "RUNNING" else []

    def _preempt(self, grace: int) -> bool:
        if not self._hosts():
            return False
        self._testbed.grace(grace)
        self._testbed.preempt(self._run.job, seconds=3)
        return True

    def _requeue(self) -> bool:
        return bool(self._hosts()) and self._testbed.ask("scontrol", "requeue", self._run.job).returncode == 0

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

    def _kill_run_supervisor(self) -> bool:
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if words[1:4] == ["-m", "ortflow.launchers.slurm.run_supervisor", str(self._run.run_dir)]:
                _kill(process)
                return True
        return False

    def _node_off(self) -> bool:
        if not (hosts := self._hosts()):
            return False
        host = self._chance.choice(hosts)
        self._testbed.node("off", host)
        self._mend.append(lambda: self._boot(host))
        return True

    def _boot(self, host: str) -> None:
        """Boot the node after Slurm has marked it DOWN.

        The kernel closes the connections of its killed processes in good order, which a power failure does not: srun
        would then wait for the lost ranks for ever.
        """
        # sinfo may say `completing` of it for minutes.
        wait_until(lambda: "State=DOWN" in self._testbed.reported("scontrol", "show", "node", host), MISSED, host)
        self._testbed.node("start", host)

    def _slurmd_dies(self) -> bool:
        if not (hosts := self._hosts()):
            return False
        host = self._chance.choice(hosts)
        self._testbed.node("slurmd-kill", host)
        pause = self._chance.choice([0.0, 25.0])
        self._mend.append(lambda: (time.sleep(pause), self._testbed.node("slurmd-start", host)))
        return True

    def _controller_dies(self) -> bool:
        self._testbed.controller("kill")
        self._mend.append(lambda: self._testbed.controller("start"))
        return True

    def _controller_restarts(self) -> bool:
        self._testbed.controller("stop")
        self._testbed.controller("start")
        return True

    def _limit(self, minutes: int) -> bool:
        """Slurm ends the job so many minutes after its start."""
        if not self._hosts():
            return False
        change = ["scontrol", "update", f"jobid={self._run.job}"]
        if self._testbed.ask(*change, f"TimeLimit={minutes}").returncode:
            return False
        # One that waits in the queue by then takes it as well.
        self._mend.append(lambda: self._testbed.ask(*change, "TimeLimit=10"))
        return True

    def _disk_full(self) -> bool:
        """To the last byte, for some seconds; `status` says so once a checkpoint is due."""
        if not rank_processes(self._run.run_dir) or self._newest_step() < 1:
            return False
        ballast = fill(self._run.run_dir.parent.parent)
        self._full_since = time.monotonic()
        self._mend.append(lambda: self._freed(ballast))
        end = time.monotonic() + NOTICED
        while time.monotonic() < end:
            how = self.look()
            if "out of disk on" in (how["waits"] or "") or how["state"] == "finished":
                return True
            if self._testbed.job(self._run.job)["JobState"] != "RUNNING":
                # An accident before this one, such as a preemption at the end of its grace, has ended the attempt.
                return True
        raise AssertionError(f"the disk is full, and nothing says so\n{how}\n{self._run.transcript()}")

    def _freed(self, ballast: Path) -> None:
        ballast.unlink()
        self._full_since = None

    def _clock_shifts(self) -> bool:
        """Of one node, for good."""
        clock = self._folder / self._chance.choice(self._testbed.nodes)
        clock.write_text(str(self._chance.choice([7200, -7200, 300, -90])))
        return True

    def _load(self) -> bool:
        """Far more to do than there are cores, for some seconds."""
        if not self._hosts():
            return False
        program = f"import time\nend = time.monotonic() + {LOAD_SECONDS}\nwhile time.monotonic() < end: pass"
        busy = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(LOAD)]
        for process in busy:
            self._mend.append(lambda process=process: (process.kill(), process.wait()))  # type: ignore[misc]
        return True

    def _kill_script(self) -> bool:
        """Slurm takes the job for failed, and nobody starts it again."""
        return bool(self._hosts()) and self._testbed.ask("scancel", "-s", "KILL", "-b", self._run.job).returncode == 0

    def _cancel_step(self) -> bool:
        """The step of the ranks alone, as `scancel JOB.0` does."""
        if not rank_processes(self._run.run_dir) or not self._hosts():
            return False
        steps = self._testbed.ask("squeue", "-h", "-s", "-j", self._run.job, "-o", "%i").stdout.split()
        numbers = sorted((int(step.partition(".")[2]), step) for step in steps if step.partition(".")[2].isdigit())
        return bool(numbers) and self._testbed.ask("scancel", numbers[-1][1]).returncode == 0

    def _signal_by_hand(self) -> bool:
        """To the ranks, or to the batch step."""
        to = self._chance.choice([[], ["-b"]])
        if not rank_processes(self._run.run_dir) or not self._hosts():
            return False
        return self._testbed.ask("scancel", "-s", "USR2", *to, self._run.job).returncode == 0

    def _has_it(self) -> str | None:
        """The job, where it has the run for some time to come."""
        job = self._run.job
        reported = self._testbed.ask("squeue", "-h", "-j", job, "-O", "State:20")
        return job if reported.stdout.strip() in ("RUNNING", "PENDING") and self._newest_step() < 30 else None

    def _submitted_again(self) -> bool:
        if (job := self._has_it()) is None:
            return False
        starts = len(self._run.records("submit"))
        done = self._run.cluster.ortflow("submit", "-b", "slurm", f"{self._run.name}.yaml")
        if self._has_it() is None:
            return True
        assert done.returncode == 2, f"{done.stdout}{done.stderr}"
        assert f"is job {job} in Slurm" in done.stderr, done.stderr
        assert len(self._run.records("submit")) == starts
        return True

    def _rendered_by_hand(self) -> bool:
        if (job := self._has_it()) is None or self._testbed.state(job) != "RUNNING":
            return False
        done = self._run.cluster.ortflow("render", "-b", "slurm", f"{self._run.name}.yaml")
        assert done.returncode == 0, done.stderr
        script = self._folder / "by-hand.sh"
        script.write_text(done.stdout)
        output = script.with_suffix(".log")
        second = self._testbed.sbatch(f"--output={output}", str(script))
        end = time.monotonic() + 40
        while self._testbed.state(second) not in FINAL and time.monotonic() < end:
            self.look()
        if self._has_it() == job and self._testbed.state(second) in FINAL:
            assert "has the run in" in output.read_text(), output.read_text()
        self._testbed.ask("scancel", second)
        return True

    EVENTS: dict[str, Callable[[Accidents], bool]] = {  # noqa: RUF012
        "preempted, grace 0": lambda self: self._preempt(0),
        "preempted, grace 15": lambda self: self._preempt(15),
        "requeued": _requeue,
        "a rank killed": _kill_rank,
        "all ranks killed": _kill_ranks,
        "the supervisor process killed": _kill_run_supervisor,
        "a node off": _node_off,
        "a daemon dead": _slurmd_dies,
        "the controller dead": _controller_dies,
        "the controller restarted": _controller_restarts,
        "the time limit cut": lambda self: self._limit(1),
        "the time limit raised": lambda self: self._limit(30),
        "the disk full": _disk_full,
        "a clock shifted": _clock_shifts,
        "load": _load,
        "the batch script killed": _kill_script,
        "the step cancelled": _cancel_step,
        "USR2 by hand": _signal_by_hand,
        "submitted again": _submitted_again,
        "rendered by hand": _rendered_by_hand,
    }


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def may_of(struck: Sequence[str]) -> list[May]:
    """What these may leave together. A signal counts as a preemption where no controller says that there was none."""
    away = any(name.startswith("the controller") for name in struck)
    found = [MAY[name] for name in struck]
    return [
        replace(may, preemptions=1, ends=f"{may.ends}|{PREEMPTED}$") if away and BY_HAND in may.ends else may
        for may in found
    ]


def unexplained(reported: list[str], places: list[str]) -> list[str]:
    """What of the ends no accident accounts for, if each place takes one of them: a bipartite matching. Pure."""
    taken: dict[int, int] = {}

    def placed(which: int, seen: set[int]) -> bool:
        for place, pattern in enumerate(places):
            if place in seen or not re.match(pattern, reported[which]):
                continue
            seen.add(place)
            if place not in taken or placed(taken[place], seen):
                taken[place] = which
                return True
        return False

    return [words for which, words in enumerate(reported) if not placed(which, set())]
