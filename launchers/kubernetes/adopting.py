"""The record directory of a run that was submitted elsewhere: by kubectl, Helm, or from another machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.payload import FOLDER, keep
from ortflow.launchers.kubernetes.place import Place, read_place, write_place
from ortflow.launchers.kubernetes.refusals import in_a_sentence
from ortflow.launchers.kubernetes.snapshot import mpijobs, of_place
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file

_HANDLE = re.compile(r"kubernetes://([a-z0-9-]+)/([a-z0-9-]+)")


def adopt(handle: str, runs: Path, links: Links | None = None) -> RunDir:
    """The record directory of kubernetes://NAMESPACE/JOB, created if missing. Raises UserError."""
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise UserError(f"{handle} does not name a run", fix="write kubernetes://NAMESPACE/MPIJOB")
    namespace, job = match[1], match[2]
    with in_a_sentence():
        cluster = (links or Links()).connect(None, namespace)
        mpijob = cluster.find("MPIJob", job, namespace)
        if mpijob is None:
            raise UserError(
                f"there is no MPIJob {job} in namespace {namespace}",
                fix="`ortflow list -b kubernetes -A` lists the runs",
            )
        name = objects.label(mpijob, objects.RUN)
        if not name:
            raise UserError(f"the MPIJob {job} was not made by ortflow")
        place = Place(namespace, name, job, cluster.context, volume=objects.directory(mpijob))
        jobs = mpijobs(cluster, namespace, name)
        for folder in (runs / name, runs / f"{namespace}-{name}", runs / job, runs / f"{namespace}-{job}"):
            run = RunDir(Path(os.path.abspath(folder)))
            recorded_place = read_place(run)
            if recorded_place is not None and _shows(recorded_place, place, jobs):
                return run
            if not run.root.exists():
                return _make(run, cluster, place, mpijob)
    raise UserError(f"{runs / name} and {run.root} hold other runs", fix="give another --runs-dir")


def handles(name: str) -> tuple[list[str], list[str]]:
    """The unfinished MPIJobs with a run's name, in the selected namespace and in others.

    Both empty if no cluster is known or it does not answer: the caller then reports an unknown name.
    """
    from ortflow.launchers.kubernetes.contexts import connect, kubeconfigs

    local_handles: list[str] = []
    elsewhere: list[str] = []
    if kubeconfigs():
        with suppress(OrtflowError, ImportError):
            cluster = connect()
            local_handles = _handles(mpijobs(cluster, cluster.namespace, name))
            selector = f"{objects.OURS},{objects.RUN}={name}"
            elsewhere = _handles(cluster.find_all("MPIJob", labels=selector, everywhere=True))
    return local_handles, [handle for handle in elsewhere if handle not in local_handles]


def _handles(mpijobs: Sequence[Object]) -> list[str]:
    return [
        Place(mpijob["metadata"]["namespace"], "", objects.name(mpijob)).handle
        for mpijob in mpijobs
        if not objects.over(mpijob)
    ]


def _shows(shown_place: Place, place: Place, mpijobs: Sequence[Object]) -> bool:
    """Whether a record directory belongs to an MPIJob: its current one, or an earlier one of the same run. Pure."""
    if (shown_place.namespace, shown_place.name) != (place.namespace, place.name):
        return False
    kin = of_place(mpijobs, shown_place)
    if shown_place.job == place.job or (kin and objects.name(kin[0]) == place.job):
        return True
    return any(objects.name(mpijob) == place.job and objects.over(mpijob) for mpijob in kin)


def _make(run: RunDir, cluster: Cluster, place: Place, mpijob: Object) -> RunDir:
    carried = cluster.find("ConfigMap", config_map_of(mpijob), place.namespace)
    if carried is None or "run.yaml" not in (carried.get("data") or {}):
        raise UserError(f"the run file of MPIJob {place.job} is no longer in the cluster")
    keep(run, carried)
    spec = load_run_file(run.root / FOLDER / "run.yaml").model_copy(update={"run_dir": None})
    write_place(run, place)
    write_atomically(run.run_file, dump_run_file(spec).encode())
    run.record_attempt(event="submit", launcher="kubernetes", job=place.job)
    return run


def config_map_of(mpijob: Object) -> str:
    """The name of the ConfigMap with the run file: an MPIJob from a supervisor uses its predecessor's. Pure."""
    replicas = (mpijob.get("spec") or {}).get("mpiReplicaSpecs") or {}
    volumes = ((replicas.get("Launcher") or {}).get("template") or {}).get("spec", {}).get("volumes") or []
    return next(
        (
            str(volume["configMap"]["name"])
            for volume in volumes
            if volume.get("name") == "run" and "configMap" in volume
        ),
        f"{objects.name(mpijob)}-run",
    )
