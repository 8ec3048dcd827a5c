"""How a submission has ended, from the run's records, and how that is reported. Used by the supervisor process."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.kubernetes.pod import FINISHED, Pod
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervision.supervisor import EXIT_CODES
from ortflow.workflow.run.rundir import write_atomically

TERMINATION = Path("/dev/termination-log")
"""Kubernetes shows its content as the reason for the container's end."""


def begun(records: Sequence[dict[str, Any]], submission: str) -> bool:
    """Whether an earlier pod of the submission has run. Pure."""
    return any(record.get("event") == "submit" and record.get("submission") == submission for record in records)


def settled(records: Sequence[dict[str, Any]]) -> int | None:
    """The exit code of the newest submission if it has ended for good, None if it continues. Pure."""
    entries = [record for record in records if record.get("event") in ("submit", "start", "end", "stop")]
    last = entries[-1] if entries else {}
    if last.get("event") == "stop" or (last.get("event") == "end" and last.get("next") == "stop"):
        return EXIT_CODES[Outcome(last["outcome"])]
    return None


def release(pod: Pod, *, at_once: bool) -> None:
    """Release the workers: the run no longer needs them, even if the operator retries.

    Not `at_once` after a success: the operator deletes them, unless a container beside this one keeps the pod alive.
    """
    with suppress(OSError):
        write_atomically(pod.released, f"{'now' if at_once else FINISHED} {uuid.uuid4().hex}".encode())


def explain(text: str) -> None:
    """Write the termination message, which `kubectl describe pod` shows."""
    with suppress(OSError):
        # The kubelet cuts the message at 4,096 bytes.
        TERMINATION.write_text(text[:4000])
