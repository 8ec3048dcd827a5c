"""Waiting until something may have changed in a run, with few requests. Used by what follows a run."""

from __future__ import annotations

from contextlib import suppress

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.workflow.system.clock import Clock

CALM = 120.0
"""Seconds between two snapshots of a run whose pods do not change."""


def wait(
    view: View, cluster: Cluster, namespace: str, period: float, clock: Clock, longest: float = CALM
) -> None:  # fmt: skip
    """Wait for the next snapshot: for a change of the pods, for `longest` at most, if all is well; else for `period`.

    Both in seconds.
    """
    if is_calm(view):
        # Without the right to watch, the run is asked for as often as otherwise.
        with suppress(Refused):
            labels = f"{objects.JOB}={view.name}"
            cluster.wait_for_change("Pod", labels, view.pods, longest, namespace)
            return
    clock.sleep(period)


def is_calm(view: View) -> bool:
    """Whether all pods of the run work, so that nothing happens without a change of one. Pure."""
    if view.mpijob is None or objects.over(view.mpijob) or objects.deleted_at(view.mpijob) is not None:
        return False
    workers = objects.of_role(view.pods, "worker")
    launchers = [pod for pod in objects.of_role(view.pods, "launcher") if not objects.has_ended(pod)]
    if len(launchers) != 1 or len(workers) != objects.workers_wanted(view.mpijob):
        return False
    outlived = any(objects.outlived_by(pod) for pod in view.pods)
    return not outlived and all(_works(pod) for pod in (*workers, *launchers))


def _works(pod: Object) -> bool:
    return objects.is_ready(pod) and objects.has_begun(pod) and not objects.has_ended(pod)
