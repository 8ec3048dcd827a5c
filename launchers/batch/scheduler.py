"""What a batch scheduler must offer so that a run is never in its queue twice: the protocol of `launchers/batch`.

Slurm's is `ortflow.launchers.slurm.commands.Slurm`. A scheduler has jobs with ids and a comment,
a list of the user's jobs, and a command that takes a script. Nothing here knows which scheduler.
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
        """`ortflow SUBMISSION`, as the script says."""

    @property
    def number(self) -> int:
        """Its place among all jobs: newer ones have larger ones."""

    @property
    def waits(self) -> bool:
        """Whether it has not started yet, or not again."""

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""


JobT = TypeVar("JobT", bound=BatchJob)
JobC = TypeVar("JobC", bound=BatchJob, covariant=True)


class NoAnswer(OrtflowError):
    """The scheduler is dead, hung or out of reach: what was asked of it may have been done all the same."""

    who: ClassVar[str] = "the scheduler"

    def __init__(self, words: str, *, then: str = "try again later") -> None:
        self.words = words
        super().__init__(f"{self.who} does not answer ({words}); {then}")


class Refused(Exception):
    """The scheduler does not take the job; `words` are its own."""

    def __init__(self, words: str) -> None:
        self.words = words
        super().__init__(words)


class Scheduler(Protocol[JobC]):
    """A batch scheduler. Every method that asks it raises NoAnswer."""

    launcher: ClassVar[str]
    """Name of its launcher, as in attempts.jsonl."""
    clock: Clock
    """That of everything that waits for the scheduler."""

    def mine(self, seconds: float | None = None) -> Sequence[JobC]:
        """Return the user's jobs, those that ended a few minutes ago among them. Waits at most `seconds`."""

    def hand_over(self, folder: Path, script: str) -> str:
        """Submit a script for the run directory `folder`; returns the job's id. Raises Refused."""

    def was_not_sent(self, words: str) -> bool:
        """Whether the words of a NoAnswer say that the submission reached nobody. Pure."""

    def refusal(self, words: str) -> UserError:
        """Return the sentence for the words of a Refused, with the key to change. Pure."""
