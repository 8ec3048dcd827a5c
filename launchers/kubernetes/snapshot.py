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
    items = cluster.find_all("MPIJob", labels=f"{objects.OURS},{objects.RUN}={name}", namespace=namespace)
    return newest_first(items)


def newest_first(items: Sequence[Object]) -> list[Object]:
    """Sorted by age, then by name. Pure."""
    return sorted(items, key=lambda item: (objects.created(item), objects.name(item)), reverse=True)


def of_place(mpijobs: Sequence[Object], place: Place) -> list[Object]:
    """The MPIJobs of a run, the selected one first, of all with its name, newest first. Pure.

    The one of the place is selected while it is active. If it is over or gone, its newest successor is: one that a
    supervisor submitted, or one on the same volume.
    """
    own_job = next((mpijob for mpijob in mpijobs if objects.name(mpijob) == place.job), None)
    if own_job is None:
        return [
            mpijob for mpijob in mpijobs if objects.name(mpijob) not in place.apart and _may_be(mpijob, place.volume)
        ]
    volume = objects.directory(own_job)
    kin = [
        mpijob
        for mpijob in mpijobs
        if mpijob is own_job
        or objects.same_owner(mpijob, own_job)
        or (objects.name(mpijob) not in place.apart and _may_be(mpijob, volume))
    ]
    later = kin[: kin.index(own_job)] if objects.over(own_job) else []
    first = later[0] if later else own_job
    return [first, *(mpijob for mpijob in kin if mpijob is not first)]


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
        own_jobs = of_place(mpijobs(cluster, namespace, place.name), place)
    except Refused as error:
        return View(None, cluster.now(), gone=why_gone(cluster, error))
    if not own_jobs:
        labels = f"{objects.OURS},{objects.JOB}={place.job}"
        orphans = cluster.find_all("Pod", labels=labels, namespace=namespace) if place.job else []
        return View(None, cluster.now(), pods=[pod for pod in orphans if objects.role(pod) in ("launcher", "worker")])
    mpijob, *older_jobs = own_jobs
    job = objects.name(mpijob)
    pods = cluster.find_all("Pod", labels=f"{objects.JOB}={job}", namespace=namespace)
    view = View(mpijob, cluster.now(), cluster.find("Job", f"{job}-launcher", namespace), pods, others=older_jobs)
    return add_events(cluster, view, namespace) if closely and not objects.over(mpijob) else view


def add_events(cluster: Cluster, view: View, namespace: str) -> View:
    """The same view with the events about what does not run."""
    launchers = [pod for pod in objects.of_role(view.pods, "launcher") if not objects.has_ended(pod)]
    worker_count = objects.workers_wanted(view.mpijob) if view.mpijob is not None else 0
    lacking = not launchers or len(objects.of_role(view.pods, "worker")) < worker_count
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
            workload = next(
                (workload_item for workload_item in owned if _owner(workload_item) == objects.uid(view.mpijob)), None
            )
    return View(view.mpijob, view.now, view.job, view.pods, events, workload, view.others)


def _owner(thing: Object) -> str:
    owners = thing["metadata"].get("ownerReferences") or []
    return str(owners[0].get("uid")) if owners else ""
