"""How a submission has ended, from the run's records, and who is told. Used by the keeper."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervisor import EXIT_CODES
from ortflow.workflow.rundir import write_atomically

TERMINATION = Path("/dev/termination-log")
"""What stands there is shown as the reason for the container's end."""


def begun(records: Sequence[dict[str, Any]], submission: str) -> bool:
    """Whether an earlier pod of the submission has been here. Pure."""
    return any(record.get("event") == "submit" and record.get("submission") == submission for record in records)


def settled(records: Sequence[dict[str, Any]]) -> int | None:
    """The exit code of the newest submission if it has ended for good, None if it is to go on. Pure."""
    telling = [record for record in records if record.get("event") in ("submit", "start", "end", "stop")]
    last = telling[-1] if telling else {}
    if last.get("event") == "stop" or (last.get("event") == "end" and last.get("next") == "stop"):
        return EXIT_CODES[Outcome(last["outcome"])]
    return None


def release(pod: Pod) -> None:
    """Let the workers go: the run does not need them any more, whatever the operator tries."""
    with suppress(OSError):
        write_atomically(pod.released, uuid.uuid4().hex.encode())


def explain(text: str) -> None:
    """Leave the reason of our end where `kubectl describe pod` shows it."""
    with suppress(OSError):
        TERMINATION.write_text(text[:4000])
