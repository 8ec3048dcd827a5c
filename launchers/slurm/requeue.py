"""What the batch step asks of Slurm about its own job: how it stands, to be queued again, to be cancelled.

Slurm signals every process of a job that it takes away, children of the batch step among them, so each command here
is started deaf to those signals.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ortflow.launchers.slurm.jobs import WAITING, read_seconds
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock

PATIENCE = 20.0
"""Seconds for one command: a controller that is down answers after 9 or 18."""
PAUSE = 3.0
"""Seconds between two tries while the controller is away."""
DEAF = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

_AWAY = re.compile(r"Unable to contact slurm controller|timed out|Unexpected message received|Connection refused|"
                   r"Zero Bytes|in standby", re.IGNORECASE)  # fmt: skip
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_UNDER_WAY = re.compile(r"pending execution|already (?:pending|requeued)", re.IGNORECASE)


class Answer(Enum):
    """What came of a wish to be queued again."""

    QUEUED = "queued"
    """Slurm starts the job again, at our wish or by itself."""
    REFUSED = "refused"
    """Not on this site, or not this job."""
    CANCELLED = "cancelled"
    """Somebody does not want it any more."""
    AWAY = "away"
    """Nobody answered in time."""


class Fate(Enum):
    """What Slurm is doing with the job, and why it may have signalled it."""

    RUNNING = "signalled"
    """Nothing: a signal came ahead of the time limit, or by hand."""
    PREEMPTED = "preempted"
    """Making room for another, in its grace period or, where it may not be requeued, behind it."""
    TIME_LIMIT = "out of time"
    QUEUED = "requeued by Slurm"
    """It comes back by itself: a requeue, a preemption without grace, a lost node."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """Nobody answered."""


@dataclass(frozen=True)
class JobOfOurs:
    """The job this process is the batch step of."""

    id: str
    """123, or 123_4 for a task of an array: the last one's own number is the whole array's."""
    restarts: int
    """How often Slurm has started it before."""
    node: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobOfOurs:
        """As Slurm tells the batch step."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            id=f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"],
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node=environment.get("SLURMD_NODENAME", ""),
        )


def comment(job: JobOfOurs) -> str:
    """The job's comment; empty where it has none, or nobody answers."""
    code, words = call("squeue", "--noheader", "--format=%k", f"--jobs={job.id}")
    return words if code == 0 and words != "(null)" else ""


def fate(job: JobOfOurs) -> Fate:
    """What Slurm is doing with the job right now."""
    code, words = call("scontrol", "show", "job", "--oneliner", job.id)
    return read_fate(words, job) if code == 0 else Fate.UNKNOWN


def read_fate(words: str, job: JobOfOurs) -> Fate:
    """The same from `scontrol show job -o`. Pure.

    Between a cancelled job and one that is taken away to come back the state alone tells no difference: a requeue, also
    that of a preemption without grace, has raised the count of restarts before the first signal is sent.
    """
    fields = dict(_FIELD.findall(words))
    if int(fields.get("Restarts", "0")) > job.restarts or fields.get("JobState") in WAITING:
        # It waits with our count of restarts where a controller has died before it had written down our start.
        return Fate.QUEUED
    preempted = fields.get("PreemptTime", "None") not in ("None", "N/A", "")
    if fields.get("JobState") in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"):
        return Fate.PREEMPTED if preempted else Fate.RUNNING
    if fields.get("Reason") == "TimeLimit" or fields.get("JobState") == "TIMEOUT":
        return Fate.TIME_LIMIT
    return Fate.PREEMPTED if preempted or fields.get("JobState") == "PREEMPTED" else Fate.CANCELLED


def seconds_left(job: JobOfOurs) -> float | None:
    """Seconds until the time limit ends the job; None where there is none, or nobody answers."""
    code, words = call("squeue", "--noheader", "--format=%L", f"--jobs={job.id}")
    return read_seconds(words) if code == 0 else None


def requeue(job: JobOfOurs, seconds: float, clock: Clock = SYSTEM_CLOCK) -> tuple[Answer, str]:
    """Ask to be queued again, for so many seconds while the controller is away; its words where it refuses.

    Never asked without a look: of a cancelled job it would make a running one, and from a node that Slurm has lost
    sight of it would hit the life that has begun elsewhere.
    """
    end = clock.monotonic() + seconds
    while True:
        seen = fate(job)
        if seen is Fate.QUEUED:
            return Answer.QUEUED, ""
        if seen is Fate.CANCELLED:
            return Answer.CANCELLED, ""
        if seen is not Fate.UNKNOWN:
            code, words = call("scontrol", "requeue", job.id)
            if code == 0 or _UNDER_WAY.search(words):
                return Answer.QUEUED, words
            if not _AWAY.search(words):
                return Answer.REFUSED, words
        if clock.monotonic() >= end:
            return Answer.AWAY, "the Slurm controller does not answer"
        clock.sleep(PAUSE)


def follow_up(job: JobOfOurs, script: Path) -> tuple[str | None, str]:
    """Submit the script again, to start when this job is over; the new job's id, or None and why not."""
    code, words = call("sbatch", "--parsable", f"--dependency=afterany:{job.id}", str(script))
    return (words.strip().split(";")[0], "") if code == 0 else (None, words)


def cancel(job: JobOfOurs) -> None:
    """End the job as cancelled: what waits for its success must not start."""
    call("scancel", job.id)


def call(*command: str) -> tuple[int, str]:
    """Exit code and words of a command of Slurm's."""
    # A job that is submitted from here would take over our task of an array, which it is not.
    foreign = ("SBATCH_", "SLURM_ARRAY_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    try:
        told = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            env={**environment, "LC_ALL": "C"},
            start_new_session=True,
            preexec_fn=_deafen,
        )
    except subprocess.TimeoutExpired:
        return 1, f"{command[0]} timed out"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return told.returncode, told.stdout.strip()


def _deafen() -> None:
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
