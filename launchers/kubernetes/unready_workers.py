"""Workers that answer but must not be used for an attempt. Used by the supervisor process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ortflow.launchers.kubernetes.hosts import short
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.sshd import keys
from ortflow.launchers.kubernetes.worker_report import is_on, key_digest, leaves, other_key
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

NEW_KEY = 180.0
"""Seconds in which kubelets bring a replaced Secret to pods; they check every minute or two."""


class UnreadyWorkers:
    """Whether a host that answers must not be used; called with its name and address."""

    def __init__(
        self,
        pod: Pod,
        report: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
        excluded: Collection[str] = (),
        retained: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._pod, self._report, self._clock, self._excluded = pod, report, clock, excluded
        self._retained = retained
        """The excluded nodes that workers cannot leave, and why."""
        self._reported: set[str] = set()
        """What has been reported, once."""
        self._until: float | None = None

    def __call__(self, host: str, address: str) -> bool:
        """Raises OrtflowError if the run's ssh key has differed for too long."""
        if leaves(self._pod, short(host), address):
            return True
        if (node := is_on(self._pod, short(host), address, self._excluded)) is not None:
            if (why := self._retained().get(node)) is None:
                self._say_once(f"{short(host)} is on {node}, which is excluded: waiting for it on another node")
                return True
            self._say_once(f"{short(host)} is on {node}, which is excluded, and stays there: {why}")
        if not other_key(self._pod, short(host), key_digest(keys())):
            return False
        if self._until is None:
            self._until = self._clock.monotonic() + NEW_KEY
            self._report(
                f"{short(host)} accepts another ssh key: the Secret was replaced, and its new key arrives soon"
            )
        elif self._clock.monotonic() > self._until:
            raise OrtflowError("the run's ssh Secret was replaced, and its key has not arrived: the next pod has it")
        return True

    def _say_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self._report(message)
