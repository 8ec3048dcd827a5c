"""Submitting a job to a batch scheduler so that a run is never queued twice, even if the scheduler does not answer.

Each try has its own id, which is recorded before the job is submitted and is in the job's comment. A slow scheduler
accepts a job but answers too late, so the queue is searched for the run's jobs after every doubt and before each try.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ortflow.launchers.batch.elapsed import seconds_since, stamp
from ortflow.launchers.batch.history import SETTLE, by_hand, find, in_doubt, newest_job
from ortflow.launchers.batch.scheduler import JobT, NoAnswer, Refused, Scheduler
from ortflow.launchers.copies import original
from ortflow.launchers.placed import placed
from ortflow.launchers.remote.arrival import submit_record
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock
from ortflow.workflow.system.disk_space import OutOfDisk, is_full, out_of_disk

Answer = TypeVar("Answer")
PATIENCE = 11.5
"""Seconds after which submitting ends with the message that the scheduler does not answer."""
PAUSE = 2.0
"""Seconds between two queries of the queue, or two tries."""


class InDoubt(OrtflowError):
    """The scheduler does not answer, and the job may or may not be in the queue."""


def new_submission() -> str:
    """Return a unique id."""
    return os.urandom(8).hex()


def place(
    run: RunDir, script: Callable[[str], str], scheduler: Scheduler[Any], retry: float, *, ask: str | None = None
) -> tuple[str, str]:
    """Submit the script that `script` makes for a submission's id; returns the id and the job.

    Tries again for `retry` seconds while the scheduler does not answer. Raises UserError with the scheduler's message,
    NoAnswer or OutOfDisk if nothing was submitted, InDoubt if that is unknown; `ask` is the command that shows it.
    """
    begun = scheduler.clock.monotonic()
    end = begun + retry
    while True:
        submission = new_submission()
        record_fields = {
            "launcher": scheduler.launcher,
            "submission": submission,
            **stamp(scheduler.clock),
            **submit_record(),
        }
        try:
            run.record_attempt(event="submitting", **record_fields)
        except OSError as error:
            if is_full(error):
                raise out_of_disk(error, default=run.root) from error
            raise
        try:
            return submission, scheduler.hand_over(run.root, script(submission))
        except OutOfDisk:
            with suppress(OSError):
                run.record_attempt(event="refused", submission=submission, why="no room for the job's script")
            raise
        except Refused as error:
            run.record_attempt(event="refused", submission=submission, why=error.message)
            raise scheduler.refusal(error.message) from error
        except NoAnswer as error:
            if scheduler.was_not_sent(error.message):
                run.record_attempt(event="refused", submission=submission, why=error.message)
                if scheduler.clock.monotonic() + PAUSE >= end:
                    raise type(error)(
                        error.message, then="nothing was submitted; try again later, or wait with --retry"
                    ) from error
            elif (job := _find_job(run, scheduler, begun, end, error, ask or f"ortflow status {run.root}")) is not None:
                return submission, job
        scheduler.clock.sleep(PAUSE)


def _find_job(
    run: RunDir, scheduler: Scheduler[Any], begun: float, end: float, doubt: NoAnswer, ask: str
) -> str | None:
    """The job whose submission had no answer; None if it is safe to submit another. Raises InDoubt."""
    sent = scheduler.clock.monotonic()
    while True:
        now = scheduler.clock.monotonic()
        patience = max(1.0, begun + PATIENCE - now) if end <= now else None
        try:
            job = active(run, scheduler, patience)
            if job is not None:
                return str(job.id)
            # The scheduler may still be processing it, although it answers other requests again.
            if in_doubt(run.read_attempts()) is None or now >= sent + SETTLE:
                return None
        except NoAnswer:
            pass
        if scheduler.clock.monotonic() + PAUSE >= max(end, begun + PATIENCE):
            raise InDoubt(
                f"{doubt.who} did not answer in time ({doubt.message}), and may have taken the job or not; "
                f"`{ask}` shows which when it answers again, and submitting again starts no second one"
            ) from doubt
        scheduler.clock.sleep(PAUSE)


def answered(ask: Callable[[], Answer], retry: float, clock: Clock) -> Answer:
    """What `ask` returns, tried again for `retry` seconds while the scheduler does not answer. Raises NoAnswer."""
    end = clock.monotonic() + retry
    while True:
        try:
            return ask()
        except NoAnswer:
            if clock.monotonic() + PAUSE >= end:
                raise
        clock.sleep(PAUSE)


def settle(run: RunDir, scheduler: Scheduler[JobT], retry: float = 0.0) -> JobT | None:
    """The run's job if it is pending or running; waits for one that may still appear.

    Tries again for `retry` seconds while the scheduler does not answer. Raises NoAnswer.
    """
    begun = scheduler.clock.monotonic()
    while True:
        job = answered(lambda: active(run, scheduler, by_hand_too=True), retry, scheduler.clock)
        doubt = in_doubt(run.read_attempts())
        if job is not None or doubt is None or waited(doubt, begun, SETTLE, scheduler.clock):
            return job
        scheduler.clock.sleep(PAUSE)


def waited(doubt: Mapping[str, Any], begun: float, seconds: float, clock: Clock) -> bool:
    """Whether so many seconds are over since a submission in doubt, which another machine may have recorded.

    Then our own clock has to see them pass, from its moment `begun` on.
    """
    return clock.monotonic() >= begun + seconds or (seconds_since(doubt, clock) or 0.0) >= seconds


def active(
    run: RunDir, scheduler: Scheduler[JobT], patience: float | None = None, *, by_hand_too: bool = False
) -> JobT | None:
    """The run's job if it is pending or running; `by_hand_too`: including one submitted by hand. Raises NoAnswer.

    A new run needs no query: a pending job that was submitted by hand exits when it finds another. The job may be
    that of another member of a group who shares the directory, which is not in this user's list.
    """
    records = run.read_attempts()
    history = placed(records, scheduler.launcher)
    if history and original(run, records, scheduler.launcher) is not None:
        history = []
    by_hand_jobs = [by_hand(run.root)] if by_hand_too else []
    if not history:
        return None
    job = find([*by_hand_jobs, *history], scheduler.mine(patience))
    newest = newest_job(history)
    if newest is not None and (job is None or (not job.active and job.id != newest)):
        job = scheduler.in_queue([newest]).get(newest, job)
    return job if job is not None and job.active else None
