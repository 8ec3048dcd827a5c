"""A run's log, copied as it comes, and its status where something may have changed: what `ortflow logs -f` shows.

One request reads the log of a launcher pod until the pod ends. The status is asked for when that request ends, when the
run's pods change, and at long intervals: not each second, as a program that only polls would have to.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import QUIET, Object
from ortflow.launchers.kubernetes.changes import CALM
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.log_replicator import LogReplicator
from ortflow.launchers.kubernetes.place import read_place
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir

PERIOD = 1.0
"""Seconds between two queries while the status is about to change, or changes cannot be watched."""


class LogFollower:
    """`with LogFollower(run, links, how) as follower`: copies the log in a thread until the run ends."""

    def __init__(self, run: RunDir, links: Links, run_status: RunStatus) -> None:
        self._run, self._links, self.how = run, links, run_status
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log follower", daemon=True)

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # It may be in the middle of a request, and writes nothing that must not be cut off.
        self._left.set()

    def active(self) -> bool:
        """Whether the run was active when it was last asked for."""
        return self.how.state.active

    def _follow(self) -> None:
        while self.how.state.active and not self._left.is_set():
            with suppress(OrtflowError):
                self._wait()
            self._left.wait(PERIOD)
            self.how = self._links.status(self._run)

    def _wait(self) -> None:
        """Copy the log until its pod ends, or wait for a change of the run's pods; at most CALM seconds."""
        cluster, place = self._links.of(self._run)
        labels = f"{objects.JOB}={self.how.job or place.job}"
        pods = cluster.find_all("Pod", labels=labels, namespace=place.namespace)
        launchers = [pod for pod in objects.of_role(pods, "launcher") if _prints(pod)]
        if not launchers or read_place(self._run) is None:
            cluster.wait_for_change("Pod", labels, pods, CALM, place.namespace)
            return
        clock = self._links.clock
        end = clock.monotonic() + CALM
        while not self._left.is_set() and clock.monotonic() < end:
            begun = clock.monotonic()
            LogReplicator(self._run, cluster).follow(launchers[-1])
            if clock.monotonic() < begun + QUIET:
                return  # the pod has ended, or another process copies its log


def _prints(pod: Object) -> bool:
    return objects.has_begun(pod) and not objects.has_ended(pod)
