"""Builders for a run's objects as a real cluster (1.34, mpi-operator 0.8.2) shows them, reduced to what matters.

Times are relative to NOW, so that tests control ages.
"""

from __future__ import annotations

import time
from typing import Any

Object = dict[str, Any]
NOW = 1_795_000_000.0
RUN, JOB, NAMESPACE = "digits", "digits-abc123", "default"
UID = "21254245-269d-4fb1-8ec5-9b656d8de883"
LABELS = {"app.kubernetes.io/name": "ortflow", "ortflow.dev/run": RUN, "ortflow.dev/job": JOB}


def stamp(moment: float) -> str:
    """A time in Kubernetes' format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def mpijob(age: float = 60.0, *, now: float = NOW, name: str = JOB, suspend: bool = False, **status: Any) -> Object:
    conditions = [
        {"type": kind, "status": value, "reason": reason, "message": message}
        for kind, value, reason, message in status.pop(
            "conditions", [("Created", "True", "MPIJobCreated", "is created.")]
        )
    ]
    shown = {**({"conditions": conditions} if conditions else {}), **status}
    template = {
        "metadata": {"labels": dict(LABELS)},
        "spec": {
            "containers": [{"name": "launcher", "image": "localhost/ortflow:test", "env": [
                {"name": "ORTFLOW_JOB", "value": name}, {"name": "ORTFLOW_NEW_BUDGET", "value": "1"}]}],
            "volumes": [{"name": "run", "configMap": {"name": f"{name}-run"}}],
        },
    }  # fmt: skip
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "uid": UID, "labels": {**LABELS, "ortflow.dev/job": name},
            "creationTimestamp": stamp(now - age),
        },
        "spec": {
            "runPolicy": {"backoffLimit": 10, "cleanPodPolicy": "Running", "suspend": suspend},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": template},
                "Worker": {
                    "replicas": 2,
                    "template": {"metadata": {"labels": dict(LABELS)}, "spec": {"containers": []}},
                },
            },
        },
        "status": shown,
    }  # fmt: skip


def batch_job(failed: int = 0, limit: int = 10, **status: Any) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{JOB}-launcher", "namespace": NAMESPACE, "uid": "9af17548"},
        "spec": {"backoffLimit": limit},
        "status": {**({"failed": failed} if failed else {}), **status},
    }


def pod(
    role: str, index: int = 0, *, phase: str = "Running", node: str = "n1", uid: str | None = None, ready: bool = True,
    state: Object | None = None, conditions: list[Object] | None = None, deleted: float | None = None,
    created: float = NOW - 50, last: Object | None = None, **status: Any,
) -> Object:  # fmt: skip
    """A worker or launcher pod; `state` is its container's."""
    name = f"{JOB}-worker-{index}" if role == "worker" else f"{JOB}-launcher-{'xyz'[index]}w9df"
    if state is None and phase in ("Running", "Succeeded", "Failed"):
        ended = {"terminated": {"exitCode": 0 if phase == "Succeeded" else 1, "reason": "Error"}}
        state = {"running": {"startedAt": stamp(created)}} if phase == "Running" else ended
    containers = [{"name": role, "state": state, "ready": ready, "lastState": last or {}}] if state is not None else []
    own = [
        {"type": "PodScheduled", "status": "True" if node else "False"},
        {"type": "Ready", "status": "True" if ready and phase == "Running" else "False"},
    ]
    metadata: Object = {
        "name": name, "namespace": NAMESPACE, "uid": uid or f"{role}-{index}", "creationTimestamp": stamp(created),
        "labels": {
            **LABELS, "ortflow.dev/component": role, "training.kubeflow.org/job-name": JOB,
            **({"training.kubeflow.org/replica-index": str(index)} if role == "worker" else {}),
        },
    }  # fmt: skip
    if deleted is not None:
        metadata["deletionTimestamp"] = stamp(deleted)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "containers": [{"name": role, "image": "localhost/ortflow:test"}],
            **({"nodeName": node} if node else {}),
        },
        "status": {
            "phase": phase, "conditions": [*(conditions or []), *own], "containerStatuses": containers, **status,
        },
    }  # fmt: skip


def unschedulable(message: str) -> dict[str, Any]:
    """The condition of a pod that cannot be scheduled."""
    return {
        "phase": "Pending", "node": "", "ready": False,
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    }  # fmt: skip


def event(about: str, reason: str, message: str, kind: str = "Warning", age: float = 5.0) -> Object:
    return {
        "metadata": {"name": f"{about}.{reason}", "namespace": NAMESPACE},
        "involvedObject": {"name": about},
        "type": kind, "reason": reason, "message": message, "lastTimestamp": stamp(NOW - age),
    }  # fmt: skip
