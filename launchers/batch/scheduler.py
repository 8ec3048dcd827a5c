"""The protocol of `launchers/batch`: what a batch scheduler must offer so that a run is never queued twice.

Slurm's is `ortflow.launchers.slurm.commands.Slurm`. A scheduler has jobs with an id and a comment,
a list of the user's jobs, and a command that submits a script. This module must not depend on one scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from ortflow.workflow.clock import Clock
from ortflow.workflow.errors import OrtflowError, UserError


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
    def waits(self) -> bool:
        """Whether it has not started yet, or not restarted yet."""

    @property
    def active(self) -> bool:
        """Whether it is pending or running."""


JobT = TypeVar("JobT", bound=BatchJob)
JobC = TypeVar("JobC", bound=BatchJob, covariant=True)


class NoAnswer(OrtflowError):
    """The scheduler is dead, hung or unreachable. The request may still have been carried out."""

    who: ClassVar[str] = "the scheduler"

    def __init__(self, words: str, *, then: str = "try again later") -> None:
        self.words = words
        super().__init__(f"{self.who} does not answer ({words}); {then}")


class Refused(Exception):
    """The scheduler rejects the job; `words` is its message."""

    def __init__(self, words: str) -> None:
        self.words = words
        super().__init__(words)


class Scheduler(Protocol[JobC]):
    """A batch scheduler. Every method that queries it raises NoAnswer."""

    launcher: ClassVar[str]
    """Name of its launcher, as in attempts.jsonl."""
    clock: Clock
    """The clock of every wait."""

    def mine(self, seconds: float | None = None) -> Sequence[JobC]:
        """Return the user's jobs, including those that ended a few minutes ago. Waits at most `seconds`."""

    def hand_over(self, folder: Path, script: str) -> str:
        """Submit a script for the run directory `folder`; returns the job's id. Raises Refused."""

    def was_not_sent(self, words: str) -> bool:
        """Whether the message of a NoAnswer shows that the submission did not reach the scheduler. Pure."""

    def refusal(self, words: str) -> UserError:
        """Return the error for the message of a Refused, with the key to change. Pure."""
