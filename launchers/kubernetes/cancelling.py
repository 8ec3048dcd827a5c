"""Ending a run that somebody no longer wants: its MPIJob is deleted, its ranks save and leave, nothing stays but the
volume.

The launcher pod's log goes with the pod, so it is read on while the pod ends: what the run says of its last step is the
last that will ever be known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.look import View, look
from ortflow.launchers.kubernetes.mirror import Mirror
from ortflow.launchers.kubernetes.place import Place, read_place, write_place
from ortflow.launchers.kubernetes.status import is_settled
from ortflow.launchers.kubernetes.submitting import sweep
from ortflow.launchers.records import Outcome
from ortflow.workflow.clock import Clock
from ortflow.workflow.rundir import RunDir

EXTRA = 30.0
"""Seconds beyond the pods' grace."""
PERIOD = 0.5


def cancel(run: RunDir, links: Links, *, now: bool) -> bool:
    """Have the run save and leave, or end it `now`; False if it is not active."""
    cluster, place = links.of(run)
    active = links.status(run).state.active
    view = look(cluster, place, closely=False)
    if view.mpijob is None or objects.over(view.mpijob):
        return False
    jobs = doomed(view)
    _leave_be(run, [one for one in view.others if one not in jobs and not objects.over(one)])
    for mpijob in jobs:
        cluster.delete("MPIJob", objects.name(mpijob), place.namespace, uid=objects.uid(mpijob))
    if now:
        for pod in view.pods:
            cluster.delete("Pod", objects.name(pod), place.namespace, grace=0, uid=objects.uid(pod))
    _read_on(run, cluster, place, view, links.clock)
    for mpijob in jobs:
        sweep(cluster, place.namespace, objects.name(mpijob))
    if active and not is_settled(run.read_attempts()):
        why = "requested by ortflow cancel"
        run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked="cancel", why=why)
    return active


def doomed(view: View) -> list[Object]:
    """The MPIJobs that go: the one that is meant, those it hangs on, and of those the ones that are not over. Pure.

    One that somebody else made of the same run stays.
    """
    assert view.mpijob is not None
    owners = {str(one.get("uid")) for one in view.mpijob["metadata"].get("ownerReferences") or []}
    kin = [one for one in view.others if objects.akin(one, view.mpijob)]
    return [view.mpijob, *(one for one in kin if not objects.over(one) or objects.uid(one) in owners)]


def _leave_be(run: RunDir, others: Sequence[Object]) -> None:
    """Have the directory not turn to other MPIJobs of the run's name when its own is gone."""
    if (place := read_place(run)) is not None and others:
        write_place(run, replace(place, apart=(*place.apart, *map(objects.name, others))))


def _read_on(run: RunDir, cluster: Cluster, place: Place, view: View, clock: Clock) -> None:
    """Take over what the launcher pod says until no pod is left, for as long as its grace lasts."""
    graces = [int((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 30) for pod in view.pods]
    end = clock.monotonic() + max(graces, default=0) + EXTRA
    labels = f"{objects.JOB}={view.name}"
    while clock.monotonic() < end:
        pods = cluster.find_all("Pod", labels=labels, namespace=place.namespace)
        ours = [pod for pod in pods if objects.role(pod) in ("launcher", "worker")]
        if not ours:
            return
        for pod in objects.of_role(ours, "launcher"):
            if read_place(run) is not None:
                Mirror(run, cluster).follow(pod)
        clock.sleep(PERIOD)
