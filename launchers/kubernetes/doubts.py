"""Which workers answer and are yet none to begin an attempt on. Used by the keeper."""

from __future__ import annotations

from collections.abc import Callable

from ortflow.launchers.kubernetes.hosts import short
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.sshd import keys
from ortflow.launchers.kubernetes.witness import key_digest, leaves, other_key
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import OrtflowError

NEW_KEY = 180.0
"""Seconds in which kubelets bring a replaced Secret to pods; they look once a minute or two."""


class Doubts:
    """Whether a host that answers is none to begin on; called with its name and address."""

    def __init__(self, pod: Pod, say: Callable[[str], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._pod, self._say, self._clock = pod, say, clock
        self._until: float | None = None

    def __call__(self, host: str, address: str) -> bool:
        """Raises OrtflowError where the run's ssh key has been another one for too long."""
        if leaves(self._pod, short(host), address):
            return True
        if not other_key(self._pod, short(host), key_digest(keys())):
            return False
        if self._until is None:
            self._until = self._clock.monotonic() + NEW_KEY
            self._say(f"{short(host)} takes another ssh key: the Secret was replaced, and its new key comes soon")
        elif self._clock.monotonic() > self._until:
            raise OrtflowError("the run's ssh Secret was replaced, and its key has not come: the next launcher has it")
        return True
