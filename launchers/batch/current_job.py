"""A batch job from inside: what the run supervisor asks a scheduler about its own job.

Slurm's is `ortflow.launchers.slurm.current_job.SlurmJob`. A scheduler signals every process of a job that it ends, so
the commands behind these methods must ignore `IGNORED_SIGNALS`. Methods that run a command raise NoAnswer,
Refused with the scheduler's message, and other OrtflowErrors.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ortflow.launchers.batch.scheduler import BatchJob, NoAnswer, Refused
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock

PAUSE = 3.0
"""Seconds between two requests while the scheduler does not answer."""
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


class Answer(Enum):
    """The result of a request to queue the job again."""

    QUEUED = "queued"
    """The scheduler starts the job again, on request or by itself."""
    REFUSED = "refused"
    """Not on this site, or not this job."""
    CANCELLED = "cancelled"
    """The job was cancelled."""
    AWAY = "away"
    """No answer in time."""


class Fate(Enum):
    """What the scheduler is doing with the job, and why it may have signalled it."""

    RUNNING = "signalled"
    """Nothing: the signal came ahead of the time limit, or was sent by hand."""
    PREEMPTED = "preempted"
    """Preempted for another job, in its grace period or, if it may not be requeued, after it."""
    TIME_LIMIT = "out of time"
    QUEUED = "requeued"
    """The scheduler restarts it by itself: a requeue, a preemption without grace, a lost node."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """No answer."""


class CurrentJob(ABC):
    """The job of this process.

    Parameters
    ----------
    id
        Its id, as in `BatchJob.id`.
    restarts
        How often the scheduler has restarted it.
    node
        The node of this process.
    """

    launcher: ClassVar[str]
    """Name of its launcher, as in attempts.jsonl."""
    scheduler: ClassVar[str]
    """Name of the scheduler, in messages."""
    folder: ClassVar[str] = ".launcher"
    """As of the `Scheduler`."""
    cancelled_by: ClassVar[str] = "scheduler"
    """Who has cancelled a job that the user cancelled there, in attempts.jsonl: one of `records.CANCELS`."""
    stay: ClassVar[float] = 600.0
    """Seconds in which the scheduler ends a job that it has queued again: the supervisor must not end before, unless
    the record shows the next start."""

    def __init__(self, id: str, restarts: int, node: str) -> None:
        self.id, self.restarts, self.node = id, restarts, node
        self.excluded: Sequence[str] = ()
        """Nodes that no further job of the run may get."""

    @property
    def task(self) -> int | None:
        """Its number in an array of several runs; None for a job alone."""
        return None

    @abstractmethod
    def query(self) -> BatchJob | None:
        """Return this job as the queue shows it; None if it does not."""

    @abstractmethod
    def fate_of(self, job: Any) -> Fate:
        """Return what the scheduler is doing with this job, from what `query` returned. Pure."""

    @abstractmethod
    def requeue(self) -> None:
        """Have the scheduler queue this job again; a job that is already queued again is not an error."""

    @abstractmethod
    def cancel(self) -> None:
        """End the job as cancelled: jobs that depend on its success must not start."""

    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit ends the job; None if there is none."""
        return None

    def follow_up(self, script: Path) -> str:
        """Submit the script again, to start when this job is over; returns the new job's id."""
        raise Refused(f"{self.scheduler} cannot submit a job from inside one")

    def remind(self, script: Path, seconds: float, name: str, log: Path) -> None:
        """Submit a script that takes one core for seconds, to start later. Raises Refused and OrtflowErrors."""
        raise Refused(f"ortflow cannot have {self.scheduler} start a job later")

    def exclude(self, nodes: Sequence[str]) -> None:
        """Keep nodes out of the next start of this job, which is queued again. Raises Refused and OrtflowErrors."""
        raise Refused(f"ortflow cannot have {self.scheduler} exclude nodes")

    def fate(self) -> Fate:
        """What the scheduler is doing with the job right now. Does not raise."""
        try:
            return self.ask_fate()
        except OrtflowError:
            return Fate.UNKNOWN

    def ask_fate(self) -> Fate:
        """The same; raises as `query` does."""
        job = self.query()
        return Fate.UNKNOWN if job is None else self.fate_of(job)

    @property
    def repeats_signals(self) -> bool:
        """Whether the scheduler itself may signal ranks of a job that it lets run."""
        return False

    def nodes(self) -> list[str] | None:
        """Return the names of the nodes that the scheduler has given to this job; None if it cannot tell."""
        return None

    def more_nodes(self, count: int, script: Path, job_nodes: Sequence[str]) -> bool:
        """Whether the scheduler would start a job of the script on `count` nodes besides `job_nodes` now."""
        return False

    def has_other_nodes(self, count: int, script: Path, without: Sequence[str]) -> bool:
        """Whether the scheduler can exclude nodes, and a job of the script could start on `count` others some day."""
        return False

    def lacking(self) -> str | None:
        """Return what this node lacks to have the job started again, in a sentence; None if nothing is known to be."""
        return None

    def lost_nodes(self, names: Sequence[str]) -> list[str]:
        """Return those of some nodes that are down, or that do not answer."""
        return []

    def queued_again(self) -> bool:
        """Whether the scheduler's record shows the next start, so that this process may end. Does not raise."""
        return False

    def taken_away(self, output: str) -> str | None:
        """Return why the scheduler has requeued the job, if not for a preemption; `output` is the attempt's. Pure."""
        return None

    def keep_script(self, run: RunDir) -> None:  # noqa: B027  # most schedulers need nothing here
        """Store the job's script where every submission stores it, for a script that was submitted by hand."""

    def begin(self, run: RunDir) -> None:  # noqa: B027  # most schedulers need nothing here
        """Leave what the scheduler's own tools look for when a job starts."""

    def leave(self, run: RunDir) -> None:  # noqa: B027  # most schedulers need nothing here
        """The same when an attempt has ended."""


def requeue(job: CurrentJob, seconds: float, clock: Clock) -> tuple[Answer, str]:
    """Request a requeue, for so many seconds while the scheduler does not answer; also returns a refusal's message.

    A command that is missing on this node, or finds no cluster, is a refusal: it will not come back.
    """
    end = clock.monotonic() + seconds
    while True:
        # A request would restart a cancelled job, and from a node that the scheduler has lost contact with it would
        # requeue the job's new start on another node.
        try:
            fate = job.ask_fate()
        except UserError as error:
            return Answer.REFUSED, str(error)
        except OrtflowError:
            fate = Fate.UNKNOWN
        if fate is Fate.QUEUED:
            return Answer.QUEUED, ""
        if fate is Fate.CANCELLED:
            return Answer.CANCELLED, ""
        if fate is not Fate.UNKNOWN:
            try:
                job.requeue()
                return Answer.QUEUED, ""
            except NoAnswer:
                pass
            except (Refused, OrtflowError) as error:
                return Answer.REFUSED, message_of(error)
        if clock.monotonic() >= end:
            return Answer.AWAY, f"{job.scheduler} does not answer"
        clock.sleep(PAUSE)


def message_of(error: Exception) -> str:
    """The scheduler's message in a NoAnswer or Refused, or the error's own."""
    return str(getattr(error, "message", error))


def ignore_signals() -> None:
    """Ignore the signals that a scheduler sends to every process of a job; for a child process before its command."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
