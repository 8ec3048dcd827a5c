"""Reading the objects that make up a run: MPIJob, its launcher Job, pods, events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from ortflow.launchers.kubernetes.api import Cluster, Object
from ortflow.manifests.kubernetes.pods import NO_RANKS

RUN, JOB, COMPONENT = "ortflow.dev/run", "ortflow.dev/job", "ortflow.dev/component"
"""Labels."""
OURS = "app.kubernetes.io/name=ortflow"
"""The label of every ortflow object."""
DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
"""Conditions of a pod that the cluster removes."""
QUEUE = "kueue.x-k8s.io/queue-name"
ROLE = "training.kubeflow.org/job-role"
"""Labels that the operator gives the pods."""


def name(thing: Object) -> str:
    """The object's name."""
    return str(thing["metadata"]["name"])


def uid(thing: Object) -> str:
    """The object's uid."""
    return str(thing["metadata"].get("uid", ""))


def namespace(thing: Object, cluster: Cluster) -> str:
    """Where it is, or would be."""
    return str(thing["metadata"].get("namespace") or cluster.namespace)


def label(thing: Object, key: str) -> str:
    """A label; empty if it has none of the key."""
    return str((thing["metadata"].get("labels") or {}).get(key, ""))


def moment(text: str | None) -> float | None:
    """Unix time of a time as Kubernetes writes it, with nanoseconds or without."""
    if not text:
        return None
    # CPython 3.10's fromisoformat takes neither Z nor nine digits.
    seconds_text, _, rest = text.rstrip("Z").partition(".")
    try:
        seconds = datetime.fromisoformat(seconds_text).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None
    return seconds + (float(f"0.{rest}") if rest.isdigit() else 0.0)


def created(thing: Object) -> float:
    """Unix time of its creation."""
    return moment(thing["metadata"].get("creationTimestamp")) or 0.0


def changed(thing: Object) -> float:
    """Unix time of its last change; 0 if the API server does not report it."""
    fields = thing["metadata"].get("managedFields") or []
    return max((moment(field.get("time")) or 0.0 for field in fields), default=0.0)


def deleted_at(thing: Object) -> float | None:
    """Unix time at which its grace period ends; None if it is not being deleted."""
    return moment(thing["metadata"].get("deletionTimestamp"))


def condition(thing: Object | None, kind: str) -> Object | None:
    """The condition of a kind, whatever its status."""
    conditions = ((thing or {}).get("status") or {}).get("conditions") or []
    return next((entry for entry in conditions if entry.get("type") == kind), None)


def holds(thing: Object | None, kind: str) -> bool:
    """Whether a condition is True."""
    return (condition(thing, kind) or {}).get("status") == "True"


def over(mpijob: Object) -> bool:
    """Whether the operator has finished it: a Failed condition alone does not mean the end."""
    return bool((mpijob.get("status") or {}).get("completionTime"))


def workers_wanted(mpijob: Object) -> int:
    """How many workers it asks for."""
    workers = ((mpijob.get("spec") or {}).get("mpiReplicaSpecs") or {}).get("Worker") or {}
    return int(workers.get("replicas", 1)) if workers else 0


def directory(mpijob: Object) -> str | None:
    """The identity of the volume of an MPIJob's run in its namespace; None if it names none.

    An ephemeral volume belongs to one MPIJob only.
    """
    replicas = (mpijob.get("spec") or {}).get("mpiReplicaSpecs") or {}
    spec = ((replicas.get("Launcher") or {}).get("template") or {}).get("spec") or {}
    volume = next((entry for entry in spec.get("volumes") or [] if entry.get("name") == "data"), None)
    if volume is None:
        return None
    mounts = [entry for container in spec.get("containers") or [] for entry in container.get("volumeMounts") or []]
    mount: Object = next((entry for entry in mounts if entry.get("name") == "data"), {})
    place = {"job": name(mpijob)} if "emptyDir" in volume else {"inside": mount.get("subPath") or ""}
    return json.dumps({**volume, **place}, sort_keys=True)


def same_owner(first: Object, other: Object) -> bool:
    """Whether one of two MPIJobs owns the other, or both have the same owner, after a supervisor's resubmission."""
    return bool(({uid(first)} | _owners(first)) & ({uid(other)} | _owners(other)))


def _owners(thing: Object) -> set[str]:
    return {str(reference.get("uid")) for reference in thing["metadata"].get("ownerReferences") or []}


def role(pod: Object) -> str:
    """launcher, worker, supervisor, tensorboard; empty for other pods."""
    return label(pod, COMPONENT) or label(pod, ROLE)


def of_role(pods: Iterable[Object], role_name: str) -> list[Object]:
    """The pods of a role, oldest first."""
    return sorted((pod for pod in pods if role(pod) == role_name), key=lambda pod: (created(pod), name(pod)))


def node(pod: Object) -> str:
    """Its node; empty before it has one."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def phase(pod: Object) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Unknown")


def main_container(pod: Object) -> Object:
    """The status of ortflow's container; empty before there is one."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    main_name = container_name(pod)
    return next((container for container in statuses if container.get("name") == main_name), {})


def beside_main(pod: Object) -> list[Object]:
    """The statuses of a pod's other containers, those that run before it first."""
    status = pod.get("status") or {}
    every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return [container for container in every if container.get("name") != container_name(pod)]


def container_of(pod: Object) -> Object:
    """The specification of ortflow's container, which is named as the pod's role.

    An admission webhook may put its own before it, as Istio does.
    """
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    main: Object = next((container for container in containers if container.get("name") == role(pod)), containers[0])
    return main


def container_name(pod: Object) -> str:
    """The name of ortflow's container."""
    return str(container_of(pod).get("name", ""))


def holds_ranks(pod: Object) -> bool:
    """Whether its resources are a worker's: a pod that only launches has fewer limits than requests."""
    if role(pod) != "launcher":
        return True
    if any(variable.get("name") == NO_RANKS for variable in container_of(pod).get("env") or []):
        return False
    resources = container_of(pod).get("resources") or {}
    return "requests" not in resources or resources["requests"] == resources.get("limits")


def has_begun(pod: Object) -> bool:
    """Whether its container has, or had, a log."""
    state = main_container(pod).get("state") or {}
    return "running" in state or "terminated" in state


def exit_code(pod: Object) -> int | None:
    """The exit code of its container; None while it runs."""
    ended = (main_container(pod).get("state") or {}).get("terminated") or {}
    return ended.get("exitCode")


def has_ended(pod: Object) -> bool:
    """Whether it has ended. A launcher's container is never restarted, and a container beside it may never end."""
    return phase(pod) in ("Succeeded", "Failed") or (role(pod) == "launcher" and exit_code(pod) is not None)


def outlived_by(pod: Object) -> list[str]:
    """The names of the containers that keep a pod whose launcher has ended from ending."""
    if not has_ended(pod) or phase(pod) != "Running":
        return []
    return [str(container.get("name")) for container in beside_main(pod) if "running" in (container.get("state") or {})]


def ended_at(pod: Object) -> float:
    """Unix time at which its container ended; 0 while it runs."""
    ended = (main_container(pod).get("state") or {}).get("terminated") or {}
    return moment(ended.get("finishedAt")) or 0.0


def is_ready(pod: Object) -> bool:
    """Whether it is ready and not being deleted."""
    return holds(pod, "Ready") and deleted_at(pod) is None


def disrupted(pod: Object) -> str | None:
    """Why the cluster removed the pod, if it did: preempted, evicted, drained, its node lost.

    Kueue's condition for pods that it evicts is TerminationTarget.
    """
    for kind in DISRUPTIONS:
        disruption = condition(pod, kind)
        if disruption is not None and disruption.get("status") == "True":
            return str(disruption.get("reason") or kind)
    reason = (pod.get("status") or {}).get("reason")
    return str(reason) if reason in ("Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown") else None


def events_of(events: Iterable[Object], thing: str, *, warnings: bool = False) -> list[Object]:
    """Events about the object with this name, oldest first."""
    own_events = [
        event
        for event in events
        if (event.get("involvedObject") or {}).get("name") == thing and (not warnings or event.get("type") == "Warning")
    ]
    return sorted(own_events, key=last_seen)


def last_seen(event: Object) -> float:
    """Time of an event's last occurrence."""
    # Events of events.k8s.io have an eventTime and no lastTimestamp.
    times: list[Any] = [event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp")]
    return next((seconds for text in times if (seconds := moment(text)) is not None), 0.0)
