"""Handing a job to a batch scheduler so that a run is never there twice, whatever it answers, or does not.

Each try has an id of its own, on record before the job is submitted and in its comment. A scheduler that is slow
takes a job and says so too late, so after every doubt, and before another try, the queue is asked for the run's jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ortflow.launchers.batch.history import SETTLE, by_hand, find, in_doubt, placed
from ortflow.launchers.batch.scheduler import JobT, NoAnswer, Refused, Scheduler
from ortflow.launchers.remote.arrival import submit_record
from ortflow.workflow.clock import Clock
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.rundir import RunDir

PATIENCE = 11.5
"""Seconds after which submitting ends with the message that the scheduler does not answer."""
DAY = 86400.0
PAUSE = 2.0
"""Seconds between two looks at the queue, or two tries."""


class InDoubt(OrtflowError):
    """Nobody answers, and the job may be in the queue or not."""


def new_submission() -> str:
    """An id that no other submission has."""
    return os.urandom(8).hex()


def place(
    run: RunDir, script: Callable[[str], str], scheduler: Scheduler[Any], retry: float, *, ask: str | None = None
) -> tuple[str, str]:
    """Submit the script that `script` makes for a submission's id; the id and the job.

    Tries again for `retry` seconds while the scheduler is away. Raises UserError with its own words, NoAnswer
    where nothing was submitted, InDoubt where that is not known; `ask` is the command that tells later.
    """
    begun = scheduler.clock.monotonic()
    end = begun + retry
    while True:
        submission = new_submission()
        run.record_attempt(event="submitting", launcher=scheduler.launcher, submission=submission, **submit_record())
        try:
            return submission, scheduler.hand_over(run.root, script(submission))
        except Refused as error:
            run.record_attempt(event="refused", submission=submission, why=error.words)
            raise scheduler.refusal(error.words) from error
        except NoAnswer as error:
            if scheduler.was_not_sent(error.words):
                run.record_attempt(event="refused", submission=submission, why=error.words)
                if scheduler.clock.monotonic() + PAUSE >= end:
                    raise type(error)(
                        error.words, then="nothing was submitted; try again later, or wait with --retry"
                    ) from error
            elif (job := _look(run, scheduler, begun, end, error, ask or f"ortflow status {run.root}")) is not None:
                return submission, job
        scheduler.clock.sleep(PAUSE)


def _look(run: RunDir, scheduler: Scheduler[Any], begun: float, end: float, doubt: NoAnswer, ask: str) -> str | None:
    """The job whose submission had no answer; None where it is safe to submit another. Raises InDoubt."""
    sent = scheduler.clock.monotonic()
    while True:
        now = scheduler.clock.monotonic()
        patience = max(1.0, begun + PATIENCE - now) if end <= now else None
        try:
            job = active(run, scheduler, patience)
            if job is not None:
                return str(job.id)
            # It may still be on its way through a scheduler that has begun to answer others.
            if in_doubt(run.read_attempts()) is None or now >= sent + SETTLE:
                return None
        except NoAnswer:
            pass
        if scheduler.clock.monotonic() + PAUSE >= max(end, begun + PATIENCE):
            raise InDoubt(
                f"{doubt.who} did not answer in time ({doubt.words}), and may have taken the job or not; "
                f"`{ask}` tells when it answers again, and submitting again starts no second one"
            ) from doubt
        scheduler.clock.sleep(PAUSE)


def settle(run: RunDir, scheduler: Scheduler[JobT]) -> JobT | None:
    """The run's job, if it waits or runs; waits for one that may still be on its way. Raises NoAnswer."""
    begun = scheduler.clock.monotonic()
    while True:
        job = active(run, scheduler, by_hand_too=True)
        since = in_doubt(run.read_attempts())
        if job is not None or since is None or waited(since, begun, SETTLE, scheduler.clock):
            return job
        scheduler.clock.sleep(PAUSE)


def waited(since: float, begun: float, seconds: float, clock: Clock) -> bool:
    """Whether so many seconds are over since the Unix time `since`, which another machine may have written.

    Clocks of two machines may be hours apart: our own has to see the seconds pass, from its moment `begun` on. A day is
    no difference of clocks.
    """
    return clock.monotonic() >= begun + seconds or clock.time() - since > DAY


def active(
    run: RunDir, scheduler: Scheduler[JobT], patience: float | None = None, *, by_hand_too: bool = False
) -> JobT | None:
    """The run's job, if it waits or runs; `by_hand_too`: one that a person has submitted, too. Raises NoAnswer.

    Nobody is asked after a run that is new: where a job by hand waits for it, that leaves when it finds another.
    """
    history = placed(run.read_attempts(), scheduler.launcher)
    more = [by_hand(run.root)] if by_hand_too else []
    job = find([*more, *history], scheduler.mine(patience)) if history else None
    return job if job is not None and job.active else None
