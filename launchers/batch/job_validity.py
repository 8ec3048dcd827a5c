"""Whether a job that starts is still its run's current job. Pure.

A slow controller may start a job that was replaced or cancelled: such a job must not take the run directory from the
current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortflow.launchers.batch.history import COMMENT
from ortflow.launchers.placed import placed

_LIFE_EVENTS = ("submitting", "submit", "start", "end", "stop")


def revoked(records: Sequence[dict[str, Any]], launcher: str, job: str, comment: str) -> str | None:
    """Why a launcher's job must not touch the run; None if it may. `comment` is the job's, empty if none is stored."""
    history = placed(records, launcher)
    submission = submission_of(comment)
    if history:
        newest = history[-1]
        is_own = newest.job == job if newest.job is not None else submission in (None, newest.submission)
        if not is_own and (submission is None or submission != newest.submission):
            return f"the run was submitted again since, as job {newest.job or 'of another submission'}"
    last = next((record for record in reversed(records) if record.get("event") in _LIFE_EVENTS), None)
    if last is not None and (last["event"] == "stop" or (last["event"] == "end" and last.get("next") == "stop")):
        return f"the run has ended: {last.get('why') or last.get('cause') or last.get('outcome')}"
    return None


def submission_of(comment: str) -> str | None:
    """The submission's id in a job's comment."""
    words = comment.split()
    return words[1] if len(words) > 1 and words[0] == COMMENT else None


def is_on_record(records: Sequence[dict[str, Any]], job: str) -> bool:
    """Whether the records name the job as the run's."""
    return any(record.get("event") == "submit" and record.get("job") == job for record in records)
