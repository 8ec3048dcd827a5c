"""The MPIJobs and pods of a whole namespace, fetched together: what `list` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.place import Place
from ortflow.launchers.kubernetes.snapshot import View, newest_first, of_place, why_gone
from ortflow.launchers.kubernetes.status import VALIDATION, status
from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.run.rundir import RunDir

# Never a directory: its parent is a device.
_NOWHERE = Path("/dev/null/none")


@dataclass(frozen=True)
class ClusterObjects:
    """All MPIJobs of a namespace, or of the cluster, and their pods, fetched together."""

    now: float
    jobs: Mapping[tuple[str, str], list[Object]]
    """By namespace and run, newest first."""
    pods: Mapping[tuple[str, str], list[Object]]
    """By namespace and MPIJob."""
    events: Sequence[Object] = ()
    """The operator's events that reject MPIJobs."""
    gone: str = ""
    """Why there can be no MPIJob at all."""

    @classmethod
    def gather(cls, cluster: Cluster, namespace: str | None, *, everywhere: bool = False) -> ClusterObjects:
        """The current objects."""
        try:
            mpijobs = cluster.find_all("MPIJob", labels=objects.OURS, namespace=namespace, everywhere=everywhere)
        except Refused as error:
            return cls(cluster.now(), {}, {}, gone=why_gone(cluster, error))
        pods: dict[tuple[str, str], list[Object]] = {}
        for pod in cluster.find_all("Pod", labels=objects.OURS, namespace=namespace, everywhere=everywhere):
            pods.setdefault((_namespace(pod), objects.label(pod, objects.JOB)), []).append(pod)
        jobs: dict[tuple[str, str], list[Object]] = {}
        for mpijob in newest_first(mpijobs):
            jobs.setdefault(_key(mpijob), []).append(mpijob)
        events: list[Object] = []
        if any(not (new_job.get("status") or {}).get("conditions") for new_job in mpijobs):
            # The list works without the right to read events.
            with suppress(Refused):
                fields = f"reason={VALIDATION}"
                events = cluster.find_all("Event", fields=fields, namespace=namespace, everywhere=everywhere)
        return cls(cluster.now(), jobs, pods, events)

    def view(self, place: Place) -> View:
        """A run, without the details that need further requests."""
        mpijobs = of_place(self.jobs.get((place.namespace, place.name), []), place)
        return self._of(mpijobs[0]) if mpijobs else View(None, self.now, gone=self.gone)

    def unknown_runs(self, known_places: Sequence[Place]) -> list[View]:
        """The MPIJobs of runs at unknown places: all active ones, and the newest of each volume."""
        views: list[View] = []
        places: dict[tuple[str, str], list[Place]] = {}
        for place in known_places:
            places.setdefault((place.namespace, place.name), []).append(place)
        for key, mpijobs in self.jobs.items():
            own_jobs = [of_place(mpijobs, place) for place in places.get(key, [])]
            shown = [kin[0] for kin in own_jobs if kin]
            claimed_jobs = shown + [
                related
                for kin in own_jobs
                for related in kin
                if objects.over(related) or objects.same_owner(related, kin[0])
            ]
            volumes = {objects.directory(related) for related in shown}
            for mpijob in mpijobs:
                if mpijob in claimed_jobs or (objects.over(mpijob) and objects.directory(mpijob) in volumes):
                    continue
                volumes.add(objects.directory(mpijob))
                views.append(self._of(mpijob))
        return views

    def _of(self, mpijob: Object) -> View:
        pods = self.pods.get((_namespace(mpijob), objects.name(mpijob)), [])
        events = [event for event in self.events if _namespace(event) == _namespace(mpijob)]
        return View(mpijob, self.now, pods=pods, events=events)


def foreign(view: View) -> RunStatus:
    """The status of a run without a directory here."""
    assert view.mpijob is not None
    place = Place(*_key(view.mpijob), view.name)
    records = [{"event": "submit", "launcher": "kubernetes"}]
    blank = read_status(RunDir(_NOWHERE), records=records, alive=True)
    run_status = status(replace(blank, name=place.name, directory=place.handle), records, view)
    return replace(run_status, job=place.handle)


def _key(mpijob: Object) -> tuple[str, str]:
    return _namespace(mpijob), objects.label(mpijob, objects.RUN)


def _namespace(thing: Object) -> str:
    return str(thing["metadata"].get("namespace"))
