"""Finds the jobs of a run's submissions among those of a batch scheduler. Pure.

A job carries the id of its submission in its comment. So a job whose submission got no answer is found again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ortflow.launchers.batch.scheduler import BatchJob, JobT
from ortflow.launchers.placed import Placed
from ortflow.launchers.records import state

SETTLE = 30.0
"""Seconds in which a job whose submission got no answer may still enter the queue."""
COMMENT = "ortflow"
"""First word of the comment of every job; the second is the submission's id."""


def by_hand(root: Path) -> Placed:
    """The submission of jobs whose script a user has submitted by hand, any number of times."""
    return Placed(f"run-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}", None)


def find_all(submission: Placed, jobs: Iterable[JobT]) -> list[JobT]:
    """The jobs of a submission that are pending or running."""
    return [job for job in jobs if job.active and belongs(job, submission)]


def find(history: Sequence[Placed], jobs: Iterable[JobT]) -> JobT | None:
    """The run's job among `jobs`: the newest that is active, else the newest."""
    candidates = list(jobs)
    ended: JobT | None = None
    for submission in reversed(history):
        matching = [job for job in candidates if belongs(job, submission)]
        for job in sorted(matching, key=lambda job: job.number, reverse=True):
            if job.active:
                return job
            ended = ended or job
    return ended


def newest_job(history: Sequence[Placed]) -> str | None:
    """The newest job whose id is known."""
    return next((submission.job for submission in reversed(history) if submission.job is not None), None)


def belongs(job: BatchJob, submission: Placed) -> bool:
    """Whether a job belongs to a submission."""
    if submission.job is not None:
        return submission.job in (job.id, job.array)
    if submission.task is not None and job.id.partition("_")[2] != submission.task:
        return False
    return job.comment.split()[:2] == [COMMENT, submission.submission]


def in_doubt(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last submission's record, if it is after the last end and its result is unknown."""
    answered = {record.get("submission") for record in records if record.get("event") in ("submit", "refused")}
    for record in reversed(records):
        if record.get("event") == "submitting" and record.get("submission") not in answered:
            return {**record}
        if record.get("event") in ("end", "stop"):
            return None
    return None


def in_order(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, with each `submit` moved to its `submitting`.

    A job may start before its id is recorded: the start of an attempt would come first.
    """
    submits = {
        record["submission"]: record
        for record in records
        if record.get("event") == "submit" and record.get("submission") is not None
    }
    begun = {record.get("submission") for record in records if record.get("event") == "submitting"}
    ordered = []
    for record in records:
        event, submission = record.get("event"), record.get("submission")
        if event == "submitting" and submission in submits:
            ordered.append(submits[submission])
        elif not (event == "submit" and submission in begun):
            ordered.append(record)
    return ordered


def is_settled(records: Sequence[dict[str, Any]]) -> bool:
    """Whether the records show how the run ended, so that the scheduler need not be queried."""
    return in_doubt(records) is None and bool(records) and not state(in_order(records), alive=True).active
