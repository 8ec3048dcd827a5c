"""What a run may have beside its MPIJob: a supervisor, a TensorBoard, a network policy, a disruption budget. Trees."""

from __future__ import annotations

from typing import Any

from ortflow.manifests.kubernetes.common import (
    COMPONENT_LABEL,
    JOB,
    JOB_LABEL,
    MOUNT,
    RUN_DIR,
    RUN_LABEL,
    SUPERVISOR,
    TENSORBOARD,
    labels,
    metadata,
    own,
)
from ortflow.manifests.kubernetes.pods import (
    AS_WORKER,
    container_security,
    data_mount,
    data_volume,
    nodes,
    pod_security,
    run_mount,
    run_volume,
)
from ortflow.manifests.kubernetes.tree import Each, Given, Item, Node, Param, Ref, Sum, When, call, text

OWN_PODS: dict[str, Node] = {
    "matchLabels": {JOB_LABEL: JOB},
    "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": ["launcher", "worker"]}],
}
BOARD_PORT = 6006
AT_ONCE = 5
"""Seconds in which a pod that has nothing to save ends: as process 1 it hears no signal while it still imports."""


def network_policy() -> Node:
    """Ranks, and the ssh daemons between them, are reached by the run's own pods alone."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(JOB),
        "spec": {
            "podSelector": OWN_PODS,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": OWN_PODS}]}],
        },
    }


def disruption_budget() -> Node:
    """No pod of the run may be evicted; for pods without a scale only a whole number is counted."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(JOB),
        "spec": {
            "minAvailable": When(AS_WORKER, Ref("resources.nodes"), Sum((Ref("resources.nodes"), 1))),
            "selector": OWN_PODS,
        },
    }


def supervisor_account() -> Node:
    """Who the supervisor is."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(SUPERVISOR)}


def role() -> Node:
    """What the supervisor may do."""
    rules: list[tuple[str, list[str], list[str]]] = [
        ("", ["pods"], ["get", "list", "watch", "delete"]),
        ("", ["pods/log"], ["get"]),
        ("", ["pods/status"], ["patch"]),
        ("", ["configmaps"], ["get"]),
        ("", ["events"], ["list"]),
        ("batch", ["jobs"], ["get", "list", "patch"]),
        ("kubeflow.org", ["mpijobs"], ["get", "list", "create", "delete"]),
    ]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(JOB),
        "rules": [{"apiGroups": [group], "resources": resources, "verbs": verbs} for group, resources, verbs in rules],
    }


def role_binding() -> Node:
    """Who may do it."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(JOB),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": JOB},
        "subjects": [{"kind": "ServiceAccount", "name": SUPERVISOR, "namespace": Param("namespace")}],
    }


def supervisor() -> Node:
    """The job that heals what the operator cannot; it is made again for as long as the run is not settled."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(SUPERVISOR),
        "spec": {
            "backoffLimit": 1000,
            "ttlSecondsAfterFinished": Given(own("time_to_live")),
            "template": {
                "metadata": {"labels": labels("supervisor")},
                "spec": {
                    "serviceAccountName": SUPERVISOR,
                    **_beside(),
                    "terminationGracePeriodSeconds": AT_ONCE,
                    "restartPolicy": "OnFailure",
                    "containers": [_supervisor_container()],
                    "volumes": [run_volume(), data_volume()],
                },
            },
        },
    }


def _supervisor_container() -> Node:
    return {
        "name": "supervisor",
        "image": own("image"),
        "imagePullPolicy": Given(own("image_pull_policy")),
        "command": [
            own("python"),
            "-m",
            "ortflow.launchers.kubernetes.supervise",
            "--namespace",
            "$(NAMESPACE)",
            "--job",
            JOB,
        ],
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "ORTFLOW_RUN_FILE", "value": "/etc/ortflow/run/run.yaml"},
            {"name": "ORTFLOW_JOB", "value": JOB},
            {"name": "ORTFLOW_MOUNT", "value": MOUNT},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": container_security(),
        "volumeMounts": [run_mount(), data_mount()],
    }


def tensorboard() -> Node:
    """A TensorBoard on the run directory; the next submission finds it there."""
    logs = call("inside", RUN_DIR, Ref("monitor.tensorboard_directory"))
    of_run = {RUN_LABEL: Ref("name"), COMPONENT_LABEL: "tensorboard"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(TENSORBOARD, lasting=True),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": of_run},
            "template": {
                "metadata": {"labels": labels("tensorboard", lasting=True)},
                "spec": {
                    "automountServiceAccountToken": False,
                    **_beside(),
                    "terminationGracePeriodSeconds": AT_ONCE,
                    "containers": [
                        {
                            "name": "tensorboard",
                            "image": own("image"),
                            "imagePullPolicy": Given(own("image_pull_policy")),
                            "command": [
                                own("python"),
                                "-m",
                                "tensorboard.main",
                                text("--logdir=%s", logs),
                                "--host=0.0.0.0",
                                f"--port={BOARD_PORT}",
                            ],
                            "ports": [{"name": "http", "containerPort": BOARD_PORT}],
                            "readinessProbe": {"tcpSocket": {"port": BOARD_PORT}, "periodSeconds": 5},
                            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
                            "securityContext": container_security(),
                            "volumeMounts": [{**data_mount(), "readOnly": True}],
                        }
                    ],
                    "volumes": [data_volume()],
                },
            },
        },
    }


def tensorboard_service() -> Node:
    """Its address in the cluster."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(TENSORBOARD, lasting=True),
        "spec": {
            "selector": {RUN_LABEL: Ref("name"), COMPONENT_LABEL: "tensorboard"},
            "ports": [{"name": "http", "port": BOARD_PORT, "targetPort": BOARD_PORT}],
        },
    }


def doctor() -> Node:
    """What `helm test` runs: whether the image has what ranks need, on the nodes where they would run."""
    notes = {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(text("%s-doctor", JOB), notes=notes),
        "spec": {
            "automountServiceAccountToken": False,
            **_beside(),
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "doctor",
                    "image": own("image"),
                    "imagePullPolicy": Given(own("image_pull_policy")),
                    "command": [own("python"), "-m", "ortflow", "image", "check"],
                    "securityContext": container_security(),
                }
            ],
        },
    }


def _beside() -> dict[Any, Node]:
    """What pods beside the ranks have: they may lie where the launcher does, and take no devices."""
    return {
        "imagePullSecrets": [Each(own("image_pull_secrets"), {"name": Item()})],
        "securityContext": pod_security(),
        **nodes("launcher"),
    }
