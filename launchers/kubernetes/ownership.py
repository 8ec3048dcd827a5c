"""Which of several live launcher pods owns the run directory. Used by the supervisor process.

A pod that is force-deleted, or whose node is cut off, may keep running beside its successor, which takes the directory
from it. The directory of another submission must not be taken while that one
writes heartbeats.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.attempts.liveness import FileChanges
from ortflow.launchers.attempts.locks import holder_of, wait_free
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.fence import EXIT_FENCED, Owner
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import read_whole

OLD_SUPERVISOR = 100.0
"""Seconds until a fenced supervisor process has released the lock: a file server takes it from a lost node after
90."""
ALIVE = 30.0
"""Seconds without a heartbeat, by our own clock, after which another supervisor process counts as dead."""
BEAT = 5.0
"""Seconds between two heartbeats."""
POLL = 1.0
"""Seconds between two checks for a heartbeat."""


class Ownership:
    """A launcher pod's claim to a run directory."""

    def __init__(self, run: RunDir, pod: Pod, clock: Clock = SYSTEM_CLOCK, beat: float = BEAT) -> None:
        self._run, self._pod, self._clock, self._beat_period = run, pod, clock, beat
        self._owner = Owner(run)

    def renew(self, **about: int) -> str:
        """Begin a generation of ranks and fence off all earlier ones; returns its token."""
        return self._owner.renew(
            job=self._pod.job, submission=self._pod.submission, pod=self._pod.name, **about
        )  # fmt: skip

    def watch(self) -> None:
        """End this process when a newer launcher pod takes the directory, and write heartbeats until then."""
        self._owner.watch(_fenced)
        # In its own thread: `prepare` may take hours.
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        pause = threading.Event()
        while True:
            with suppress(OSError):
                _beats(self._run).touch()
            pause.wait(self._beat_period)

    def settle_with_others(self, grace: float, report: Callable[[str], None]) -> None:
        """Fence off an earlier pod. Raises UserError if another submission holds the run.

        A pod that has just been deleted, as by a Helm upgrade, gets `grace` seconds to save and stop.
        """
        run, owner = self._run, owner_of(self._run)
        if owner is None:
            return
        if owner.get("submission") != self._pod.submission and holder_of(run.lock) is not None:
            other = owner.get("job", "another launcher")
            report(f"the run directory is in use by {other}: checking whether it is alive")
            if self._other_stays(grace + ALIVE):
                raise UserError(
                    f"{run.root} is in use by the MPIJob {other}",
                    where="name",
                    fix="wait for it, delete it, or give this run another name or run_dir",
                )
        self.renew()
        if not wait_free(run.lock, OLD_SUPERVISOR, self._clock):
            raise OrtflowError(f"{run.lock} stays locked by a launcher pod that is fenced off")

    def _other_stays(self, seconds: float) -> bool:
        """Whether the owner of the directory keeps writing heartbeats for so long, with no pause as long as ALIVE."""
        watched, last_change = 0.0, self._clock.monotonic()
        beats = FileChanges([_beats(self._run)], watched)
        while not wait_free(self._run.lock, POLL, self._clock):
            # Time during which the volume does not answer does not count: no heartbeat can be written.
            now = self._clock.monotonic()
            watched, last_change = watched + min(now - last_change, 2 * POLL), now
            if beats.quiet(watched) >= ALIVE:
                return False
            if watched >= seconds:
                return True
        return False


def owner_of(run: RunDir) -> dict[str, Any] | None:
    """The owner of a run directory; None if there was none, or the file cannot be read."""
    try:
        owner = json.loads(read_whole(run.owner))
    except (OSError, ValueError, RecursionError):
        return None
    return owner if isinstance(owner, dict) else None


def _beats(run: RunDir) -> Path:
    return run.root / ".run_supervisor"


def _fenced() -> None:
    print("a newer launcher pod owns the run directory: this one ends", flush=True)
    os._exit(EXIT_FENCED)
