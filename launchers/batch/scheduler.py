"""A batch scheduler from outside of its jobs: what it must offer so that a run is never queued twice.

Slurm's is `ortflow.launchers.slurm.commands.Slurm`. A scheduler has jobs with an id and a comment, a list of the
user's jobs, and commands that submit a script and cancel a job. This module must not depend on one scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock


class BatchJob(Protocol):
    """A job in the queue, or one that has left it."""

    @property
    def id(self) -> str:
        """Its id; ARRAY_TASK for a task of an array."""

    @property
    def array(self) -> str | None:
        """The array that it is a task of."""

    @property
    def comment(self) -> str:
        """`ortflow SUBMISSION`, as set by the script."""

    @property
    def number(self) -> int:
        """Its order among all jobs; newer jobs have larger numbers."""

    @property
    def state(self) -> str:
        """Its state, in the scheduler's terms."""

    @property
    def waits(self) -> bool:
        """Whether it has not started yet, or not restarted yet."""

    @property
    def active(self) -> bool:
        """Whether it is pending or running."""

    @property
    def suspended(self) -> bool:
        """Whether its processes are stopped, so that they cannot act on a request."""

    @property
    def ending(self) -> bool:
        """Whether the scheduler is ending its processes, to restart it or finally."""

    @property
    def nodes(self) -> str:
        """Its nodes, as the scheduler writes them; empty if unknown."""

    @property
    def restarts(self) -> int:
        """How often the scheduler has restarted it."""

    @property
    def end(self) -> float | None:
        """Unix time at which its time limit ends it; None if unknown."""


JobT = TypeVar("JobT", bound=BatchJob)


class NoAnswer(OrtflowError):
    """The scheduler is dead, hung or unreachable. The request may still have been carried out."""

    who: ClassVar[str] = "the scheduler"

    def __init__(self, message: str, *, then: str = "try again later") -> None:
        self.message = message
        super().__init__(f"{self.who} does not answer ({message}); {then}")


class NotOwner(UserError):
    """The job belongs to another user, for example a member of one's group who shares the run directory."""


class Refused(Exception):
    """The scheduler rejects the job; `message` is its reason."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class Scheduler(ABC, Generic[JobT]):
    """A batch scheduler. Every method that queries it raises NoAnswer."""

    launcher: ClassVar[str]
    """Name of its launcher, as in attempts.jsonl."""
    name: ClassVar[str]
    """Its name, in messages."""
    submit_command: ClassVar[str]
    """Its command that submits a script, in messages."""
    folder: ClassVar[str] = ".launcher"
    """Folder of the job's script in the run directory."""
    clock: Clock = SYSTEM_CLOCK
    """The clock of every wait."""

    @abstractmethod
    def mine(self, seconds: float | None = None) -> Sequence[JobT]:
        """Return the user's jobs, including those that ended a few minutes ago. Waits at most `seconds`."""

    @abstractmethod
    def hand_over(self, folder: Path, script: str) -> str:
        """Submit a script for the run directory `folder`; returns the job's id. Raises Refused and OutOfDisk."""

    @abstractmethod
    def cancel(self, *job_ids: str, pending: bool = False) -> None:
        """Cancel jobs; `pending`: only those that have not started. A job that is already gone is not an error.

        Raises NotOwner.
        """

    @abstractmethod
    def waiting(self, job: JobT) -> str | None:
        """Return why an active job does nothing at the moment, and the fix; None if its processes run. Pure."""

    def job(self, job_id: str) -> JobT | None:
        """Return a job that is not among `mine`, by its id; None if it is forgotten."""
        return None

    def in_queue(self, job_ids: Sequence[str]) -> Mapping[str, JobT]:
        """Return jobs that another user may have submitted, by id; without those it has forgotten."""
        return {job_id: job for job_id in job_ids if (job := self.job(job_id)) is not None}

    def accounted(self, job_ids: Sequence[str]) -> Mapping[str, JobT]:
        """The same for many jobs with one query, by id."""
        return {}

    def was_not_sent(self, message: str) -> bool:
        """Whether the message of a NoAnswer shows that the submission did not reach the scheduler. Pure."""
        return False

    def refusal(self, message: str) -> UserError:
        """Return the error for the message of a Refused, with the key to change. Pure."""
        return UserError(f"{self.name} rejects the job: {message}")

    def expected_start(self, job: JobT) -> float | None:
        """Return the Unix time at which a pending job is expected to start; None if unknown. Pure."""
        return None

    def left_in_queue(self, job: JobT) -> str:
        """Return why a run that has ended still has a pending job, and how that job ends. Pure."""
        return f"the run has ended, and job {job.id} is still in the queue; it ends when it starts"

    def cancelled(self, job: JobT) -> str | None:
        """Return how a job was cancelled that left no record; None if it was not cancelled. Pure."""
        return None

    def ending(self, run: RunDir, job: JobT | None, job_id: str | None) -> str:
        """Return how a job ended that left no record in the run directory; `job` is None if it is forgotten."""
        return f"{self.name} no longer knows of job {job_id}, and it left no record"
