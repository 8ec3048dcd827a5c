"""A fake scheduler: answers the commands of `ortflow.launchers.slurm.commands.Slurm` with a real one's output.

For what a real controller cannot be made to do quickly: be away, be slow, accept a job and confirm it too late. The
output is a real Slurm's (22.05).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fake_clock import FakeClock

from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.jobs import SEPARATOR, Job
from ortflow.launchers.slurm.runner import Answer, Settings

DEAD = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
DEAD_SBATCH = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"
HUNG = "slurm_load_jobs error: Socket timed out on send/recv operation\n"
HUNG_SBATCH = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified\n"


@dataclass
class Fake:
    """The controller; `calls` are the commands that it received."""

    jobs: list[Job] = field(default_factory=list)
    version: str = "slurm-wlm 22.05.8"
    plugins: tuple[str, ...] = ("pmi2", "pmix")
    others: list[Job] = field(default_factory=list)
    """Jobs of other users: in no list of one's own."""
    accounted: list[Job] = field(default_factory=list)
    away: str | None = None
    """Why it does not answer: dead or hung."""
    refuses: str | None = None
    """What sbatch says in place of taking the job."""
    on_sbatch: Callable[[Fake, Job], Answer | None] | None = None
    """Fake when a job comes; an answer in place of the usual one, where the job is taken or not."""
    calls: list[list[str]] = field(default_factory=list)
    settings: list[Settings] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    next_id: int = 100
    config: str = ""
    """What `scontrol show config` says."""
    arrays: dict[str, str] = field(default_factory=dict)
    """--array of the jobs that are one."""
    clock: FakeClock = field(default_factory=FakeClock)
    """By which its clients wait."""

    @property
    def slurm(self) -> Slurm:
        """The client's view."""
        return Slurm(self, self.clock)

    def __call__(self, command: Sequence[str], settings: Settings, seconds: float) -> Answer:
        self.calls.append([*command])
        self.settings.append(settings)
        name, *arguments = command
        return {
            "sbatch": self.sbatch, "squeue": self.squeue, "scontrol": self.scontrol, "sacct": self.sacct,
            "scancel": self.scancel, "srun": self.srun,
        }[name](arguments)  # fmt: skip

    def count(self, name: str) -> int:
        """How often a command was called."""
        return sum(call[0] == name for call in self.calls)

    def change(self, job_id: str, **fields: object) -> None:
        """Change a job."""
        self.jobs = [replace(job, **fields) if job.id == job_id else job for job in self.jobs]  # type: ignore[arg-type]

    def take(self, job: Job) -> None:
        """Queue a job, with all its tasks if it is an array."""
        tasks = [f"_{task}" for task in _tasks(self.arrays[job.id])] if job.id in self.arrays else [""]
        self.jobs += [replace(job, id=job.id + task, array=job.id if task else None) for task in tasks]

    def _away(self, command: str) -> Answer | None:
        if self.away is None:
            return None
        if command == "sbatch":
            return Answer(1, "", DEAD_SBATCH if self.away == "dead" else HUNG_SBATCH)
        return Answer(1, "", DEAD if self.away == "dead" else HUNG)

    def sbatch(self, arguments: Sequence[str]) -> Answer:
        if "--version" in arguments:
            return Answer(0, self.version + "\n", "")
        text = Path(arguments[-1]).read_text()
        self.scripts.append(text)
        if (away := self._away("sbatch")) is not None:
            return away
        if self.refuses is not None:
            return Answer(1, "", self.refuses)
        found = dict(re.findall(r'^#SBATCH --([a-z-]+)="?([^"\n]*)"?$', text, re.MULTILINE))
        job = Job(
            str(self.next_id), None, "PENDING", "Resources", name=found["job-name"], comment=found["comment"],
            dependency=found.get("dependency", ""),
        )  # fmt: skip
        self.next_id += 1
        if "array" in found:
            self.arrays[job.id] = found["array"]
        if self.on_sbatch is not None and (answer := self.on_sbatch(self, job)) is not None:
            return answer
        self.take(job)
        return Answer(0, f"{job.id}\n", "")

    def squeue(self, arguments: Sequence[str]) -> Answer:
        if (away := self._away("squeue")) is not None:
            return away
        asked = next((one.partition("=")[2].split(",") for one in arguments if one.startswith("--jobs=")), None)
        if asked is None:
            return Answer(0, "".join(_squeue_line(job) for job in self.jobs), "")
        shown = [job for job in [*self.jobs, *self.others] if {job.id, job.array} & {*asked}]
        if not shown and len(asked) == 1:
            return Answer(1, "", UNKNOWN)
        return Answer(0, "".join(map(_squeue_line, shown)), "")

    def scontrol(self, arguments: Sequence[str]) -> Answer:
        if (away := self._away("scontrol")) is not None:
            return away
        if arguments[-1] == "config":
            return Answer(0, self.config, "")
        shown = next((job for job in self.others if job.id == arguments[-1]), None)
        if shown is None:
            return Answer(1, "", UNKNOWN)
        return Answer(0, f"JobId={shown.id} JobName={shown.name} JobState={shown.state} Restarts=0 ExitCode=0:0\n", "")

    def sacct(self, arguments: Sequence[str]) -> Answer:
        if not self.accounted:
            return Answer(1, "", "Slurm accounting storage is disabled\n")
        wanted = arguments[-1].split(",")
        return Answer(0, "".join(_sacct_line(job) for job in self.accounted if job.id in wanted), "")

    def scancel(self, arguments: Sequence[str]) -> Answer:
        if (away := self._away("scancel")) is not None:
            return away
        named = {*arguments}
        if refused := [job.id for job in self.others if job.id in named and "--state=PENDING" not in named]:
            words = f"scancel: error: Kill job error on job id {refused[0]}: Access/permission denied\n"
            return Answer(1, "", words)
        if "--state=PENDING" in named:
            # As 22.05 does: with a filter, one waiting task of an array stands for all of them.
            named |= {job_id.partition("_")[0] for job_id in named}
        for job in self.jobs:
            if {job.id, job.array} & named and job.active and ("--state=PENDING" not in arguments or job.waits):
                self.change(job.id, state="CANCELLED")
        return Answer(0, "", "")

    def srun(self, arguments: Sequence[str]) -> Answer:
        kind = arguments[0].removeprefix("--mpi=")
        if kind not in self.plugins:
            return Answer(1, "", f"srun: error: Invalid MPI type '{kind}', --mpi=list for acceptable types\n")
        if self.away == "hung":
            raise subprocess.TimeoutExpired("srun", 1.0)
        return Answer(1, "", "srun: error: Unable to confirm allocation for job 67108862: Invalid job id specified\n")


def late(fake: Fake, job: Job) -> Answer:
    """The controller accepts the job and confirms it too late."""
    fake.take(job)
    return Answer(1, "", HUNG_SBATCH)


def _tasks(array: str) -> list[int]:
    spans = [part.partition("-") for part in array.partition("%")[0].split(",")]
    return [task for first, _, last in spans for task in range(int(first), int(last or first) + 1)]


def _squeue_line(job: Job) -> str:
    values = (
        job.id, job.array or job.id, job.state, job.reason or "None", _time(job.start), _time(job.end), "10:00",
        job.nodes, job.restarts, job.code << 8 | job.signal, job.name, job.comment or "(null)", _time(job.submitted),
        job.dependency or "(null)", _time(1.0 if job.preempted else None),
    )  # fmt: skip
    return "".join(f"{value}{SEPARATOR}" for value in values) + "\n"


def _sacct_line(job: Job) -> str:
    values = (
        job.id, job.state, _time(job.start), _time(job.end), "00:10:00", job.nodes, f"{job.code}:{job.signal}",
        job.name, "", _time(job.submitted),
    )  # fmt: skip
    return SEPARATOR.join(map(str, values)) + "\n"


def _time(moment: float | None) -> str:
    return "N/A" if moment is None else str(int(moment))
