"""Cancelling a run: its MPIJob is deleted, its ranks save and stop, and only the volume
stays.

The launcher pod's log is deleted with the pod, so it is read while the pod ends: afterwards the run's last output is
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.log_replicator import LogReplicator
from ortflow.launchers.kubernetes.object_creation import sweep
from ortflow.launchers.kubernetes.place import Place, read_place, write_place
from ortflow.launchers.kubernetes.snapshot import View, take_snapshot
from ortflow.launchers.kubernetes.status import is_settled, orphaned
from ortflow.launchers.records import Outcome
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock

EXTRA = 30.0
"""Seconds beyond the pods' grace."""
PERIOD = 0.5


def cancel(run: RunDir, links: Links, *, now: bool) -> bool:
    """Ask the run to save and stop, or end it `now`; False if it is not active."""
    cluster, place = links.of(run)
    active = links.status(run).state.active
    view = take_snapshot(cluster, place, closely=False)
    if view.mpijob is None and orphaned(view):
        _delete_orphans(run, cluster, place, view, links.clock)
        return active
    if view.mpijob is None or objects.over(view.mpijob):
        return False
    jobs = jobs_to_delete(view)
    _stop_following(run, [other for other in view.others if other not in jobs and not objects.over(other)])
    for mpijob in jobs:
        cluster.delete("MPIJob", objects.name(mpijob), place.namespace, uid=objects.uid(mpijob))
    if now:
        for pod in view.pods:
            cluster.delete("Pod", objects.name(pod), place.namespace, grace=0, uid=objects.uid(pod))
    _read_on(run, cluster, place, view, links.clock)
    for mpijob in jobs:
        sweep(cluster, place.namespace, objects.name(mpijob))
    _record(run, active=active)
    return active


def _record(run: RunDir, *, active: bool) -> None:
    if active and not is_settled(run.read_attempts()):
        reason = "requested by ortflow cancel"
        run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked="cancel", why=reason)


def _delete_orphans(run: RunDir, cluster: Cluster, place: Place, view: View, clock: Clock) -> None:
    """Delete what an MPIJob that was deleted alone has left; first the Job, which would make another launcher pod."""
    job = str(place.job)
    documents = (("Job", f"{job}-launcher"), ("ConfigMap", f"{job}-config"), ("Service", job), ("Secret", f"{job}-ssh"))
    for kind, name in documents:
        with suppress(Refused):
            cluster.delete(kind, name, place.namespace)
    for pod in view.pods:
        cluster.delete("Pod", objects.name(pod), place.namespace, uid=objects.uid(pod))
    _read_on(run, cluster, place, view, clock)
    sweep(cluster, place.namespace, job)
    _record(run, active=True)


def jobs_to_delete(view: View) -> list[Object]:
    """The MPIJobs to delete: the selected one and those related to it, unless they are over. Pure.

    One that another user made of the same run stays.
    """
    assert view.mpijob is not None
    owners = {str(owner.get("uid")) for owner in view.mpijob["metadata"].get("ownerReferences") or []}
    kin = [other for other in view.others if objects.same_owner(other, view.mpijob)]
    return [view.mpijob, *(other for other in kin if not objects.over(other) or objects.uid(other) in owners)]


def _stop_following(run: RunDir, mpijobs: Sequence[Object]) -> None:
    """Keep the directory from following other MPIJobs with the run's name after its own is gone."""
    if (place := read_place(run)) is not None and mpijobs:
        write_place(run, replace(place, apart=(*place.apart, *map(objects.name, mpijobs))))


def _read_on(run: RunDir, cluster: Cluster, place: Place, view: View, clock: Clock) -> None:
    """Copy the launcher pod's log until no pod is left, at most for its grace period."""
    graces = [int((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 30) for pod in view.pods]
    end = clock.monotonic() + max(graces, default=0) + EXTRA
    labels = f"{objects.JOB}={view.name or place.job}"
    while clock.monotonic() < end:
        pods = cluster.find_all("Pod", labels=labels, namespace=place.namespace)
        own_pods = [pod for pod in pods if objects.role(pod) in ("launcher", "worker")]
        if not own_pods:
            return
        for pod in objects.of_role(own_pods, "launcher"):
            if read_place(run) is not None:
                LogReplicator(run, cluster).follow(pod)
        clock.sleep(PERIOD)
