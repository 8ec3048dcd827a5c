"""Rules for overlays: what they must not change, because the operator and the pods of a run rely on it. Pure.

The API server does not know these rules: it accepts an MPIJob that breaks them, and then nothing runs. What it rejects
itself is not repeated here. A rule yields the place in the document and the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ortflow.manifests.kubernetes.common import COMPONENT_LABEL, JOB_LABEL, RUN_LABEL, VERSION_ANNOTATION
from ortflow.manifests.kubernetes.schema import check_document
from ortflow.workflow.spec.problem import KeyPath, Problem, listed, nearest, shown

Document = dict[str, Any]

_IN_REPLICAS: tuple[KeyPath, ...] = (
    (),
    ("template",),
    ("template", "metadata"),
    ("template", "metadata", "labels"),
    ("template", "spec"),
)
_SECTIONS: tuple[KeyPath, ...] = (
    ("metadata",),
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("spec",),
    ("spec", "runPolicy"),
    ("spec", "mpiReplicaSpecs"),
    *(("spec", "mpiReplicaSpecs", kind, *path) for kind in ("Launcher", "Worker") for path in _IN_REPLICAS),
)
"""Objects that the other rules inspect, outermost first."""
_POLICY = ("spec", "runPolicy")
_WORDS = {
    "cleanPodPolicy": ("None", "Running", "All"),
    "managedBy": ("kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"),
}
"""Fields of `runPolicy` for which the API server accepts any text, but the operator does not."""
_LEAST: dict[KeyPath, int] = {
    ("backoffLimit",): 0,
    ("activeDeadlineSeconds",): 1,
    ("ttlSecondsAfterFinished",): 0,
    ("schedulingPolicy", "minAvailable"): 0,
    ("schedulingPolicy", "scheduleTimeoutSeconds"): 0,
}
"""The same for numbers."""
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


def broken(document: Document, before: Document) -> Iterator[Problem]:
    """Every rule that a document breaks; `before` is the document without overlays."""
    problems = [*_without_sections(document, before)] or [*check_document(document)]
    if problems:
        yield from problems
        return
    yield from _unchanged(document, before, _FIXED)
    if document["kind"] == "MPIJob":
        yield from _job(document, before)


def _without_sections(document: Document, before: Document) -> Iterator[Problem]:
    yield from _unchanged(document, before, (("kind",),))
    for path in _SECTIONS:
        now = _at(document, path)
        if isinstance(_at(before, path), dict) and not isinstance(now, dict):
            yield Problem(path, f"must be a mapping, not {shown(now)}")
            return


def _unchanged(
    document: Document, before: Document, paths: tuple[KeyPath, ...], prefix: KeyPath = ()
) -> Iterator[Problem]:
    for path in paths:
        was, now = _at(before, path), _at(document, path)
        if was != now:
            yield Problem((*prefix, *path), "must not be there" if was is None else f"must stay {_said(was)}")


def _said(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else shown(value)


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _job(document: Document, before: Document) -> Iterator[Problem]:
    yield from _unchanged(document, before, _FIXED_OF_JOB)
    yield from _run_policy(document["spec"]["runPolicy"])
    replicas, own_replicas = document["spec"]["mpiReplicaSpecs"], before["spec"]["mpiReplicaSpecs"]
    for kind in replicas:
        path = ("spec", "mpiReplicaSpecs", kind)
        if kind not in own_replicas:
            yield Problem(path, "must not be there")
        else:
            yield from _replicas(replicas[kind], own_replicas[kind], path)
    least = _at(document, ("spec", "runPolicy", "schedulingPolicy", "minAvailable"))
    workers = _at(own_replicas, ("Worker", "replicas")) or 0
    if isinstance(least, int) and least > workers:
        message = f"is {least}, more than the {workers} workers: the launcher pod is created when they are ready"
        yield Problem(("spec", "runPolicy", "schedulingPolicy", "minAvailable"), message)


def _run_policy(policy: Document) -> Iterator[Problem]:
    for key in ("cleanPodPolicy", "backoffLimit"):
        if policy.get(key) is None:
            yield Problem((*_POLICY, key), "is missing")
    for key, allowed in _WORDS.items():
        if policy.get(key, allowed[0]) not in allowed:
            near = nearest(str(policy[key]), allowed)
            fix = f"did you mean {near}?" if near else None
            yield Problem((*_POLICY, key), f"must be {listed(allowed)}, not {shown(policy[key])}", fix)
    for path, least in _LEAST.items():
        number = _at(policy, path)
        if isinstance(number, int) and number < least:
            yield Problem((*_POLICY, *path), f"must be at least {least}, not {number}")


def _replicas(replicas: Document, own_replicas: Document, path: KeyPath) -> Iterator[Problem]:
    yield from _unchanged(replicas, own_replicas, _FIXED_OF_REPLICAS, path)
    pod, our_pod = replicas["template"]["spec"], own_replicas["template"]["spec"]
    pod_path = (*path, "template", "spec")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if isinstance(grace, int) and grace < our_pod["terminationGracePeriodSeconds"]:
        message = f"is {grace}, less than backends.kubernetes.grace_seconds"
        yield Problem((*pod_path, "terminationGracePeriodSeconds"), message)
    for place, container in enumerate(_items(pod, "containers")):
        if _never_starts(pod, container):
            message = "is true, and the user is root: the pod would never start"
            yield Problem((*pod_path, "containers", place, "securityContext", "runAsNonRoot"), message)
    container, our_container = next(_items(pod, "containers"), {}), our_pod["containers"][0]
    inside = (*pod_path, "containers", 0)
    yield from _unchanged(container, our_container, _FIXED_OF_CONTAINER, inside)
    yield from _kept(container, our_container, "env", lambda name: name.startswith("ORTFLOW_"), inside)
    yield from _kept(container, our_container, "volumeMounts", lambda name: name in ("run", "data", "shm"), inside)
    yield from _kept(pod, our_pod, "volumes", lambda name: name in ("run", "data"), pod_path)


def _never_starts(pod: Document, container: Document) -> bool:
    """Whether the kubelet would never start it."""
    # The API server does not compare the two fields.
    user, other = (
        _at(container, ("securityContext", key))
        if _at(container, ("securityContext", key)) is not None
        else _at(pod, ("securityContext", key))
        for key in ("runAsUser", "runAsNonRoot")
    )
    return user == 0 and other is True


def _items(section: Document, key: str) -> Iterator[Document]:
    items = section.get(key)
    return (item for item in items if isinstance(item, dict)) if isinstance(items, list) else iter(())


def _kept(
    document: Document, before: Document, kind: str, is_required: Callable[[str], bool], path: KeyPath
) -> Iterator[Problem]:
    """Items of a list that the run relies on."""
    now = {item.get("name"): item for item in _items(document, kind)}
    for item in before.get(kind, ()):
        if is_required(item["name"]) and now.get(item["name"]) != item:
            yield Problem((*path, kind, item["name"]), "must not be changed: the run depends on it")
