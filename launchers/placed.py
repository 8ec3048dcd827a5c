"""The submissions of a run that a batch scheduler has accepted, or may have accepted, from its records. Pure.

Before a job is submitted, `submitting` records a unique id, which the job carries; `submit` names its job, and
`refused` records that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placed:
    """One submission of a run."""

    submission: str | None
    """Its unique id; None for a job that follows another and has its comment."""
    job: str | None
    """Its job; None if the scheduler gave no answer."""
    task: str | None = None
    """The run's task in an array of several runs."""


def placed(records: Sequence[dict[str, Any]], launcher: str) -> list[Placed]:
    """The submissions that a launcher's scheduler has accepted, or may have accepted, oldest first."""
    submissions: dict[str, Placed] = {}
    for record in records:
        event, submission = record.get("event"), record.get("submission")
        if record.get("launcher") == launcher and event in ("submitting", "submit"):
            submissions[submission or f"job {record.get('job')}"] = Placed(
                submission, record.get("job"), record.get("task")
            )
        elif event == "refused" and submission in submissions:
            del submissions[submission]
        elif event == "copied":
            # Records before it are the history of the directory that this one was copied from.
            submissions.clear()
    return list(submissions.values())
