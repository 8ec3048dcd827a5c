"""One look at a run in its cluster: its objects, fetched together. What they mean is `status`'s and `healer`'s."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused

MANY = 4
"""Pods whose events are asked for: one that cannot start tells for all."""


@dataclass(frozen=True)
class View:
    """A run's objects at one moment."""

    mpijob: Object | None
    """The newest of the run."""
    now: float
    """Unix time."""
    job: Object | None = None
    """The batch Job of the launcher pods."""
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    workload: Object | None = None
    """Kueue's."""
    others: Sequence[Object] = field(default=())
    """Older MPIJobs of the run that are still there."""

    @property
    def name(self) -> str:
        """The MPIJob's."""
        return objects.name(self.mpijob) if self.mpijob is not None else ""


def mpijobs(cluster: Cluster, namespace: str | None, name: str) -> list[Object]:
    """The MPIJobs of a run, newest first."""
    found = cluster.find_all("MPIJob", labels=f"{objects.OURS},{objects.RUN}={name}", namespace=namespace)
    return sorted(found, key=lambda one: (objects.created(one), objects.name(one)), reverse=True)


def look(cluster: Cluster, namespace: str, name: str, *, closely: bool = True) -> View:
    """The run as it is; `closely` also asks for events where something does not run."""
    found = mpijobs(cluster, namespace, name)
    if not found:
        return View(None, time.time())
    mpijob, *others = found
    job = objects.name(mpijob)
    pods = cluster.find_all("Pod", labels=f"{objects.JOB}={job}", namespace=namespace)
    view = View(mpijob, time.time(), cluster.find("Job", f"{job}-launcher", namespace), pods, others=others)
    return add_events(cluster, view, namespace) if closely and not objects.over(mpijob) else view


def add_events(cluster: Cluster, view: View, namespace: str) -> View:
    """The same view with what was said about what does not run."""
    launchers = objects.of_role(view.pods, "launcher")
    still = [pod for pod in view.pods if objects.phase(pod) == "Pending" or not objects.has_begun(pod)]
    if not still and launchers and view.mpijob is not None:
        return view
    about = [*(objects.name(pod) for pod in still[:MANY]), f"{view.name}-launcher", view.name]
    events: list[Object] = []
    workload = None
    # Who may not read events still gets a status.
    with suppress(Refused):
        for thing in about:
            events += cluster.find_all("Event", fields=f"involvedObject.name={thing}", namespace=namespace)
    if view.mpijob is not None and objects.label(view.mpijob, objects.QUEUE):
        with suppress(Refused):
            owned = cluster.find_all("Workload", namespace=namespace)
            workload = next((one for one in owned if _owner(one) == objects.uid(view.mpijob)), None)
    return View(view.mpijob, view.now, view.job, view.pods, events, workload, view.others)


def _owner(thing: Object) -> str:
    owners = thing["metadata"].get("ownerReferences") or []
    return str(owners[0].get("uid")) if owners else ""
