"""A snapshot of a run in its cluster: its objects, fetched together. `status` and `reconciler` interpret it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.place import Place
from ortflow.launchers.kubernetes.resources import CRD, VERSION

MANY = 4
"""Number of pods whose events are fetched: one that cannot start stands for all."""


@dataclass(frozen=True)
class View:
    """A run's objects at one moment."""

    mpijob: Object | None
    """The selected one."""
    now: float
    """Unix time by the API server's clock, which sets the times of objects."""
    job: Object | None = None
    """The batch Job of the launcher pods."""
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    workload: Object | None = None
    """Kueue's."""
    others: Sequence[Object] = field(default=())
    """More MPIJobs of the run."""
    gone: str = ""
    """Why there can be no MPIJob at all."""

    @property
    def name(self) -> str:
        """The MPIJob's."""
        return objects.name(self.mpijob) if self.mpijob is not None else ""


def mpijobs(cluster: Cluster, namespace: str | None, name: str) -> list[Object]:
    """The MPIJobs of a run's name, newest first; raises Refused, with 404 if the cluster has no MPIJobs."""
    found = cluster.find_all("MPIJob", labels=f"{objects.OURS},{objects.RUN}={name}", namespace=namespace)
    return newest_first(found)


def newest_first(found: Sequence[Object]) -> list[Object]:
    """Sorted by age, then by name. Pure."""
    return sorted(found, key=lambda one: (objects.created(one), objects.name(one)), reverse=True)


def of_place(found: Sequence[Object], place: Place) -> list[Object]:
    """The MPIJobs of a run, the selected one first, of all with its name, newest first. Pure.

    The one of the place is selected while it is active. If it is over or gone, its newest successor is: one that a
    supervisor submitted, or one on the same volume.
    """
    named = next((one for one in found if objects.name(one) == place.job), None)
    if named is None:
        return [one for one in found if objects.name(one) not in place.apart and _may_be(one, place.volume)]
    volume = objects.directory(named)
    kin = [
        one
        for one in found
        if one is named
        or objects.same_owner(one, named)
        or (objects.name(one) not in place.apart and _may_be(one, volume))
    ]
    later = kin[: kin.index(named)] if objects.over(named) else []
    first = later[0] if later else named
    return [first, *(one for one in kin if one is not first)]


def _may_be(mpijob: Object, volume: str | None) -> bool:
    return volume is None or objects.directory(mpijob) in (volume, None)


def why_gone(cluster: Cluster, error: Refused) -> str:
    """Why MPIJobs cannot be listed, if all of them are gone; raises the error if that is uncertain."""
    if error.code != 404 or cluster.serves_mpijobs(VERSION):
        raise error
    return f"the cluster knows no MPIJobs any more: the CRD {CRD} was deleted"


def take_snapshot(cluster: Cluster, place: Place, *, closely: bool = True) -> View:
    """The run now; `closely` also fetches events if something does not run."""
    namespace = place.namespace
    try:
        found = of_place(mpijobs(cluster, namespace, place.name), place)
    except Refused as error:
        return View(None, cluster.now(), gone=why_gone(cluster, error))
    if not found:
        labels = f"{objects.OURS},{objects.JOB}={place.job}"
        left = cluster.find_all("Pod", labels=labels, namespace=namespace) if place.job else []
        return View(None, cluster.now(), pods=[pod for pod in left if objects.role(pod) in ("launcher", "worker")])
    mpijob, *others = found
    job = objects.name(mpijob)
    pods = cluster.find_all("Pod", labels=f"{objects.JOB}={job}", namespace=namespace)
    view = View(mpijob, cluster.now(), cluster.find("Job", f"{job}-launcher", namespace), pods, others=others)
    return add_events(cluster, view, namespace) if closely and not objects.over(mpijob) else view


def add_events(cluster: Cluster, view: View, namespace: str) -> View:
    """The same view with the events about what does not run."""
    launchers = [pod for pod in objects.of_role(view.pods, "launcher") if not objects.has_ended(pod)]
    wanted = objects.workers_wanted(view.mpijob) if view.mpijob is not None else 0
    lacking = not launchers or len(objects.of_role(view.pods, "worker")) < wanted
    still = [pod for pod in view.pods if objects.phase(pod) == "Pending" or not objects.has_begun(pod)]
    if not still and not lacking:
        return view
    about = [*(objects.name(pod) for pod in still[:MANY]), f"{view.name}-launcher", view.name]
    events: list[Object] = []
    workload = None
    # The status works without the right to read events.
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
