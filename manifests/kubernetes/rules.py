"""What documents with overlays on them must still keep to: what the operator and the pods of a run rely on. Pure.

The API server takes an MPIJob that breaks most of these, and then nothing runs. A rule yields the place in the
document and what is wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ortflow.manifests.kubernetes.common import COMPONENT_LABEL, JOB_LABEL, RUN_LABEL, VERSION_ANNOTATION
from ortflow.workflow.spec.checks.kubernetes_pod import check_pod
from ortflow.workflow.spec.checks.kubernetes_shapes import INT32, LABEL_VALUE, POD, whole
from ortflow.workflow.spec.checks.kubernetes_syntax import is_qualified
from ortflow.workflow.spec.checks.shapes import ANY, check_shape, words
from ortflow.workflow.spec.problem import KeyPath, Problem, shown

Document = dict[str, Any]

_METADATA = {
    "name!": str,
    "namespace": str,
    "labels": {"*": LABEL_VALUE},
    "annotations": {"*": str},
    "finalizers": [str],
    "ownerReferences": ANY,
}
_TEMPLATE = {"metadata": {"labels": {"*": LABEL_VALUE}, "annotations": {"*": str}}, "spec!": POD}
_REPLICAS = {"replicas": whole(0), "restartPolicy": words("Never OnFailure"), "template!": _TEMPLATE}
_MPIJOB = {
    "apiVersion!": str,
    "kind!": str,
    "metadata!": _METADATA,
    "spec!": {
        "mpiImplementation": words("MPICH OpenMPI Intel"),
        "slotsPerWorker": whole(1),
        "runLauncherAsWorker": bool,
        "launcherCreationPolicy": words("AtStartup WaitForWorkersReady"),
        "sshAuthMountPath": str,
        "mpiReplicaSpecs!": {"Launcher!": _REPLICAS, "Worker": _REPLICAS},
        "runPolicy!": {
            "cleanPodPolicy!": words("None Running All"),
            "backoffLimit!": whole(0),
            "activeDeadlineSeconds": whole(1, 2**63 - 1),
            "ttlSecondsAfterFinished": whole(0),
            "suspend": bool,
            "managedBy": words("kubeflow.org/mpi-operator kueue.x-k8s.io/multikueue"),
            "schedulingPolicy": {
                "minAvailable": whole(0),
                "queue": str,
                "priorityClass": str,
                "scheduleTimeoutSeconds": whole(0, INT32),
                "minResources": ANY,
            },
        },
    },
}
_ANY_DOCUMENT = {"apiVersion!": str, "kind!": str, "metadata!": _METADATA, "*": ANY}
_FIXED = (
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "labels", RUN_LABEL),
    ("metadata", "labels", JOB_LABEL),
    ("metadata", "labels", "app.kubernetes.io/name"),
    ("metadata", "labels", "app.kubernetes.io/managed-by"),
    ("metadata", "annotations", VERSION_ANNOTATION),
)
_FIXED_OF_JOB = (
    ("spec", "mpiImplementation"),
    ("spec", "slotsPerWorker"),
    ("spec", "runLauncherAsWorker"),
    ("spec", "launcherCreationPolicy"),
    ("spec", "sshAuthMountPath"),
)
_FIXED_OF_REPLICAS = (
    ("replicas",),
    ("restartPolicy",),
    ("template", "spec", "restartPolicy"),
    ("template", "metadata", "labels", JOB_LABEL),
    ("template", "metadata", "labels", COMPONENT_LABEL),
)
_FIXED_OF_CONTAINER = (("name",), ("command",), ("args",))
_FIXED_MOUNTS = frozenset({"run", "data", "shm"})


def broken(document: Document, before: Document) -> Iterator[Problem]:
    """Every rule that a document breaks which was `before` when it had no overlay."""
    job = document.get("kind") == "MPIJob"
    wrong = [*check_shape(document, _MPIJOB if job else _ANY_DOCUMENT, ())]
    if wrong:
        yield from wrong
        return
    yield from _unchanged(document, before, _FIXED)
    for kind in ("labels", "annotations"):
        for name in document["metadata"].get(kind, {}):
            if not is_qualified(name):
                yield Problem(("metadata", kind, name), "is not a name of a label")
    if job:
        yield from _job(document, before)


def _unchanged(
    document: Document, before: Document, paths: tuple[KeyPath, ...], around: KeyPath = ()
) -> Iterator[Problem]:
    for path in paths:
        was, now = _at(before, path), _at(document, path)
        if was != now:
            yield Problem((*around, *path), "must not be there" if was is None else f"must stay {_said(was)}")


def _said(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else shown(value)


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _job(document: Document, before: Document) -> Iterator[Problem]:
    yield from _unchanged(document, before, _FIXED_OF_JOB)
    replicas, ours = document["spec"]["mpiReplicaSpecs"], before["spec"]["mpiReplicaSpecs"]
    for kind in ("Launcher", "Worker"):
        path = ("spec", "mpiReplicaSpecs", kind)
        if (kind in replicas) != (kind in ours):
            yield Problem(path, "must stay" if kind in ours else "must stay away: all ranks are in the launcher's pod")
        elif kind in ours:
            yield from _replicas(replicas[kind], ours[kind], path)
    least = _at(document, ("spec", "runPolicy", "schedulingPolicy", "minAvailable"))
    workers = _at(ours, ("Worker", "replicas")) or 0
    if least is not None and least > workers:
        what = f"is {least}, more than the {workers} workers: the launcher is made when they are ready"
        yield Problem(("spec", "runPolicy", "schedulingPolicy", "minAvailable"), what)


def _replicas(replicas: Document, ours: Document, path: KeyPath) -> Iterator[Problem]:
    yield from _unchanged(replicas, ours, _FIXED_OF_REPLICAS, path)
    pod, our_pod = replicas["template"]["spec"], ours["template"]["spec"]
    here = (*path, "template", "spec")
    yield from check_pod(pod, here)
    for name in (*replicas["template"].get("metadata", {}).get("labels", {}),):
        if not is_qualified(name):
            yield Problem((*path, "template", "metadata", "labels", name), "is not a name of a label")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if grace < our_pod["terminationGracePeriodSeconds"]:
        what = f"is {grace}, less than backends.kubernetes.grace_seconds"
        yield Problem((*here, "terminationGracePeriodSeconds"), what)
    if not pod["containers"]:
        return
    container, our_container = pod["containers"][0], our_pod["containers"][0]
    inside = (*here, "containers", 0)
    yield from _unchanged(container, our_container, _FIXED_OF_CONTAINER, inside)
    for kind, named, wanted in (
        ("env", "name", lambda item: item["name"].startswith("ORTFLOW_")),
        ("volumeMounts", "name", lambda item: item["name"] in _FIXED_MOUNTS),
    ):
        yield from _kept(container, our_container, kind, named, wanted, inside)
    yield from _kept(pod, our_pod, "volumes", "name", lambda item: item["name"] in ("run", "data"), here)


def _kept(
    document: Document, before: Document, kind: str, named: str, wanted: Callable[[Any], bool], path: KeyPath
) -> Iterator[Problem]:
    """Items of a list that the run relies on."""
    now = {item[named]: item for item in document.get(kind, ())}
    for item in before.get(kind, ()):
        if wanted(item) and now.get(item[named]) != item:
            yield Problem((*path, kind, item[named]), "must stay as it is: the run relies on it")
