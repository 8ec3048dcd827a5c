"""Whether a job that has come to run is still the one that its run waits for. Pure.

A controller that was slow may start a job that somebody has given up and replaced, or cancelled: it must not take the
run directory away from the rightful one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortflow.launchers.batch.history import COMMENT, placed

_TOLD = ("submitting", "submit", "start", "end", "stop")


def revoked(records: Sequence[dict[str, Any]], launcher: str, job: str, comment: str) -> str | None:
    """Why a launcher's job may not touch the run; None if it may. `comment` is its own; empty where none is kept."""
    history = placed(records, launcher)
    submission = submission_of(comment)
    if history:
        newest = history[-1]
        mine = newest.job == job if newest.job is not None else submission in (None, newest.submission)
        if not mine and (submission is None or submission != newest.submission):
            return f"the run was submitted again since, as job {newest.job or 'of another submission'}"
    last = next((record for record in reversed(records) if record.get("event") in _TOLD), None)
    if last is not None and (last["event"] == "stop" or (last["event"] == "end" and last.get("next") == "stop")):
        return f"the run has ended: {last.get('why') or last.get('cause') or last.get('outcome')}"
    return None


def submission_of(comment: str) -> str | None:
    """The submission's id in a job's comment."""
    words = comment.split()
    return words[1] if len(words) > 1 and words[0] == COMMENT else None


def is_on_record(records: Sequence[dict[str, Any]], job: str) -> bool:
    """Whether somebody has put on record that the job is the run's."""
    return any(record.get("event") == "submit" and record.get("job") == job for record in records)
