"""The Slurm job of this process. Used by the run supervisor, in the batch step."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ortflow.launchers.attempts.exclusion import is_among
from ortflow.launchers.batch.current_job import CurrentJob, Fate
from ortflow.launchers.batch.scheduler import Refused
from ortflow.launchers.slurm.allocation import expected_start, hostnames, lost, would_start
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.jobs import WAITING, Job
from ortflow.launchers.slurm.outcome import begin_job, leave_result
from ortflow.launchers.slurm.runner import run_in_job
from ortflow.launchers.slurm.sbatch import FOLDER
from ortflow.launchers.slurm.srun_output import taken_away
from ortflow.manifests.batch import SCRIPT
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir, write_atomically

_EXCLUDED = re.compile(r"\bExcNodeList=(?!\(null\))(\S+)")
REMINDER_MINUTES = 2
PATIENCE = 20.0
"""Seconds for one command: a controller that is down answers after 9 or 18."""


class SlurmJob(CurrentJob):
    """The job of this batch step: 123, or 123_4 for a task of an array."""

    launcher = "slurm"
    scheduler = "Slurm"
    folder = FOLDER
    cancelled_by = "scancel"

    def __init__(self, id: str, restarts: int, node: str, slurm: Slurm | None = None) -> None:
        super().__init__(id, restarts, node)
        self._slurm = slurm or Slurm(run_in_job, patience=PATIENCE)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> SlurmJob:
        """From the environment that Slurm sets for the batch step."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            # Of an array the last task's own number is the whole array's.
            id=f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"],
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node=environment.get("SLURMD_NODENAME", ""),
        )

    @property
    def task(self) -> int | None:
        task = self.id.partition("_")[2]
        return int(task) if task else None

    def query(self) -> Job | None:
        return self._slurm.queued(self.id)

    def fate_of(self, job: Job) -> Fate:
        return fate_of(job, self.restarts)

    def requeue(self) -> None:
        self._slurm.requeue(self.id)

    def cancel(self) -> None:
        self._slurm.cancel(self.id)

    def seconds_left(self) -> float | None:
        return self._slurm.seconds_left(self.id)

    def follow_up(self, script: Path) -> str:
        settings = {name: None for name in os.environ if name.startswith("SBATCH_")}
        without = [f"--exclude={self._without(self.excluded)}"] if self.excluded else []
        return self._slurm.submit(str(script), settings, f"--dependency=afterany:{self.id}", *without)

    def remind(self, script: Path, seconds: float, name: str, log: Path) -> None:
        # Where this job runs; none of its nodes, GPUs and memory.
        places = {"partition": "SLURM_JOB_PARTITION", "account": "SLURM_JOB_ACCOUNT", "qos": "SLURM_JOB_QOS"}
        where = [
            f"--{option}={os.environ[variable]}" for option, variable in places.items() if os.environ.get(variable)
        ]
        ours = {variable: None for variable in os.environ if variable.startswith("SBATCH_")}
        self._slurm.submit(
            str(script), ours, f"--begin=now+{math.ceil(seconds)}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1",
            f"--time={REMINDER_MINUTES}", "--export=ALL", "--no-requeue", "--open-mode=append", f"--job-name={name}",
            # In a path of --output, % begins a pattern.
            f"--output={str(log).replace('%', '%%')}", *where,
        )  # fmt: skip

    def exclude(self, nodes: Sequence[str]) -> None:
        """Only of a pending job, which a running one is as soon as it is queued again."""
        # The value replaces the job's list.
        command = ["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={self._without(nodes)}"]
        answer = self._slurm.answer(command)
        if answer.code:
            raise Refused(answer.message)

    def _without(self, nodes: Sequence[str]) -> str:
        """Slurm's list of these nodes, by its own names, and of those that the job excludes already."""
        answer = self._slurm.answer(["scontrol", "show", "job", "--oneliner", self.id])
        before = _EXCLUDED.search(answer.out) if answer.code == 0 else None
        names = [name for name in self.nodes() or () if is_among(name, nodes)]
        gone = [node for node in nodes if not any(is_among(name, [node]) for name in names)]
        return ",".join(dict.fromkeys([*([before[1]] if before else []), *names, *gone]))

    @property
    def repeats_signals(self) -> bool:
        # Slurm 22.05 sends the end of a step to a node that did not answer again 60 s later (RPC_RETRY_INTERVAL). A job
        # that was requeued meanwhile has a step with the same number there, and its rank gets that SIGTERM.
        return self.restarts > 0

    def nodes(self) -> list[str] | None:
        names = os.environ.get("SLURM_JOB_NODELIST")
        return hostnames(self._slurm, names) if names else None

    def more_nodes(self, count: int, script: Path, job_nodes: Sequence[str]) -> bool:
        # An array's script is beside the runs, and would start all its tasks.
        return self.task is None and script.exists() and would_start(self._slurm, script, count, job_nodes)

    def has_other_nodes(self, count: int, script: Path, without: Sequence[str]) -> bool:
        if self.task is not None or not script.exists():
            return False
        return expected_start(self._slurm, script, count, self._without(without).split(",")) is not None

    def lacking(self) -> str | None:
        if shutil.which("scontrol") is not None:
            return None
        if shutil.which("sbatch") is not None:
            return f"there is no scontrol on {self.node}: in place of a requeue, another job will follow this one"
        return (
            f"there are no commands of Slurm on {self.node}: nothing starts the run again after a preemption or the "
            "time limit, except `ortflow resume`; put them on the PATH in backends.slurm.prologue"
        )

    def lost_nodes(self, names: Sequence[str]) -> list[str]:
        return lost(self._slurm, names)

    def queued_again(self) -> bool:
        # A batch script that ends after the requeue changes nothing. For one that stays, Slurm 22.05 waits KillWait
        # (30 s by default) before it kills it, and then as long as a credential is valid until the next start.
        with suppress(OrtflowError):
            job = self.query()
            return job is not None and job.restarts > self.restarts
        return False

    def taken_away(self, output: str) -> str | None:
        return taken_away(output)

    def keep_script(self, run: RunDir) -> None:
        if self.task is None:  # an array's script would start all its tasks again
            write_atomically(run.root / FOLDER / SCRIPT, self._slurm.script(self.id).encode())

    def begin(self, run: RunDir) -> None:
        begin_job(run, self.id)

    def leave(self, run: RunDir) -> None:
        leave_result(run, self.id)


def fate_of(job: Job, restarts: int) -> Fate:
    """What Slurm is doing with the job of a batch step that was restarted so often. Pure.

    The state alone does not distinguish a cancelled job from a requeued one: a requeue, also
    that of a preemption without grace, has raised the count of restarts before the first signal is sent.
    """
    if job.restarts > restarts or job.state in WAITING:
        # It is pending with our restart count if a controller died before it had stored our start.
        return Fate.QUEUED
    if job.state in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"):
        return Fate.PREEMPTED if job.preempted else Fate.RUNNING
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        return Fate.TIME_LIMIT
    return Fate.PREEMPTED if job.preempted or job.state == "PREEMPTED" else Fate.CANCELLED
