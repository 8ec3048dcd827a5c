"""The batch step's requests to Slurm about its own job: state, requeue, cancel.

Slurm signals every process of a job that it ends, including children of the batch step, so each command here
is started with those signals ignored.
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
"""Seconds between two tries while the controller does not answer."""
DEAF = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

_AWAY = re.compile(r"Unable to contact slurm controller|timed out|Unexpected message received|Connection refused|"
                   r"Zero Bytes|in standby", re.IGNORECASE)  # fmt: skip
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_UNDER_WAY = re.compile(r"pending execution|already (?:pending|requeued)", re.IGNORECASE)


class Answer(Enum):
    """The result of a requeue request."""

    QUEUED = "queued"
    """Slurm starts the job again, on request or by itself."""
    REFUSED = "refused"
    """Not on this site, or not this job."""
    CANCELLED = "cancelled"
    """The job was cancelled."""
    AWAY = "away"
    """No answer in time."""


class Fate(Enum):
    """What Slurm is doing with the job, and why it may have signalled it."""

    RUNNING = "signalled"
    """Nothing: the signal came ahead of the time limit, or was sent by hand."""
    PREEMPTED = "preempted"
    """Preempted for another job, in its grace period or, if it may not be requeued, after it."""
    TIME_LIMIT = "out of time"
    QUEUED = "requeued by Slurm"
    """Slurm restarts it by itself: a requeue, a preemption without grace, a lost node."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """No answer."""


@dataclass(frozen=True)
class JobOfOurs:
    """The job of this batch step."""

    id: str
    """123, or 123_4 for a task of an array: the last one's own number is the whole array's."""
    restarts: int
    """How often Slurm has restarted it."""
    node: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobOfOurs:
        """From the environment that Slurm sets for the batch step."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            id=f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"],
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node=environment.get("SLURMD_NODENAME", ""),
        )


def comment(job: JobOfOurs) -> str:
    """The job's comment; empty if it has none or Slurm does not answer."""
    code, words = call("squeue", "--noheader", "--format=%k", f"--jobs={job.id}")
    return words if code == 0 and words != "(null)" else ""


def fate(job: JobOfOurs) -> Fate:
    """What Slurm is doing with the job right now."""
    code, words = call("scontrol", "show", "job", "--oneliner", job.id)
    return read_fate(words, job) if code == 0 else Fate.UNKNOWN


def read_fate(words: str, job: JobOfOurs) -> Fate:
    """The same from `scontrol show job -o`. Pure.

    The state alone does not distinguish a cancelled job from a requeued one: a requeue, also
    that of a preemption without grace, has raised the count of restarts before the first signal is sent.
    """
    fields = dict(_FIELD.findall(words))
    if int(fields.get("Restarts", "0")) > job.restarts or fields.get("JobState") in WAITING:
        # It is pending with our restart count if a controller died before it had stored our start.
        return Fate.QUEUED
    preempted = fields.get("PreemptTime", "None") not in ("None", "N/A", "")
    if fields.get("JobState") in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"):
        return Fate.PREEMPTED if preempted else Fate.RUNNING
    if fields.get("Reason") == "TimeLimit" or fields.get("JobState") == "TIMEOUT":
        return Fate.TIME_LIMIT
    return Fate.PREEMPTED if preempted or fields.get("JobState") == "PREEMPTED" else Fate.CANCELLED


def seconds_left(job: JobOfOurs) -> float | None:
    """Seconds until the time limit ends the job; None if there is none or Slurm does not answer."""
    code, words = call("squeue", "--noheader", "--format=%L", f"--jobs={job.id}")
    return read_seconds(words) if code == 0 else None


def requeue(job: JobOfOurs, seconds: float, clock: Clock = SYSTEM_CLOCK) -> tuple[Answer, str]:
    """Request a requeue, for so many seconds while the controller does not answer; also returns a refusal's message.

    Checks the state before each request: it would restart a cancelled job, and from a node that Slurm has lost
    contact with it would requeue the job's new start on another node.
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
    """End the job as cancelled: jobs that depend on its success must not start."""
    call("scancel", job.id)


def call(*command: str) -> tuple[int, str]:
    """Exit code and output of a Slurm command."""
    # A job that is submitted from here would inherit our array task id, which is wrong for it.
    foreign = ("SBATCH_", "SLURM_ARRAY_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    try:
        reported = subprocess.run(
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
    return reported.returncode, reported.stdout.strip()


def _deafen() -> None:
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
