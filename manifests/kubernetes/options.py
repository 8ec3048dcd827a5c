"""Optional objects of a run: a supervisor, TensorBoard, a network policy, a disruption budget. Pure."""

from __future__ import annotations

from ortflow.manifests.kubernetes.common import (
    COMPONENT_LABEL,
    JOB_LABEL,
    RUN_FOLDER,
    RUN_LABEL,
    Context,
    Document,
    metadata,
    pod_metadata,
    present,
)
from ortflow.manifests.kubernetes.names import inside, sibling
from ortflow.manifests.kubernetes.pods import (
    ROOT,
    container_security,
    data_mount,
    data_volume,
    limits,
    placement,
    run_mount,
    run_volume,
)
from ortflow.workflow.spec.checks.nodes import permitted

BOARD_PORT = 6006
GRACE = 5
"""Grace period in seconds of a pod that saves nothing: as process 1 it receives no signal while it still imports."""
RULES = (
    ("", ["pods"], ["get", "list", "watch", "delete"]),
    ("", ["pods/log"], ["get"]),
    ("", ["pods/status"], ["patch"]),
    ("", ["configmaps"], ["get"]),
    ("", ["events"], ["list"]),
    ("batch", ["jobs"], ["get", "list", "patch"]),
    ("kubeflow.org", ["mpijobs"], ["get", "list", "create", "patch", "delete"]),
)
"""API group, resources and verbs that the supervisor needs."""


def network_policy(context: Context) -> Document:
    """Ranks, and the ssh daemons between them, are reachable only from the run's own pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(context, context.job),
        "spec": {
            "podSelector": _ranks(context),
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": _ranks(context)}]}],
        },
    }


def disruption_budget(context: Context) -> Document:
    """Forbids eviction of the pods that the run needs. For pods without a scale, only an absolute number is allowed."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(context, context.job),
        "spec": {
            "minAvailable": permitted(context.spec)[0] + (not context.backend.launcher_as_worker),
            "selector": _ranks(context),
        },
    }


def supervisor_account(context: Context) -> Document:
    """The supervisor's service account."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(context, context.supervisor)}


def role(context: Context) -> Document:
    """The supervisor's permissions."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(context, context.job),
        "rules": [{"apiGroups": [group], "resources": resources, "verbs": verbs} for group, resources, verbs in RULES],
    }


def role_binding(context: Context) -> Document:
    """Binds the permissions to the account."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(context, context.job),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": context.job},
        # Unlike an object, a subject has no default namespace.
        "subjects": [{"kind": "ServiceAccount", "name": context.supervisor, "namespace": context.namespace}],
    }


def supervisor(context: Context) -> Document:
    """The job that repairs what the operator cannot. Its pod is replaced until the run has ended."""
    backend = context.backend
    container = {
        "name": "supervisor",
        "image": backend.image,
        "imagePullPolicy": backend.image_pull_policy,
        "command": [
            backend.python,
            "-m",
            "ortflow.launchers.kubernetes.supervise",
            "--namespace",
            # Expanded by the kubelet: no shell runs here.
            "$(NAMESPACE)",
            "--job",
            context.job,
        ],
        "workingDir": ROOT,
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "ORTFLOW_RUN_FILE", "value": f"{RUN_FOLDER}/run.yaml"},
            {"name": "ORTFLOW_JOB", "value": context.job},
            {"name": "ORTFLOW_MOUNT", "value": backend.volume.mount},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": limits(context, "512Mi")},
        "securityContext": container_security(context) or None,
        "volumeMounts": [run_mount(), data_mount(context)],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(context, context.supervisor),
        "spec": present(
            {
                "backoffLimit": 1000,
                "ttlSecondsAfterFinished": backend.time_to_live,
                "template": {
                    "metadata": pod_metadata(context, "supervisor"),
                    "spec": {
                        "serviceAccountName": context.supervisor,
                        **placement(context, "launcher"),
                        "terminationGracePeriodSeconds": GRACE,
                        "restartPolicy": "OnFailure",
                        "containers": [present(container)],
                        "volumes": [run_volume(context), data_volume(context)],
                    },
                },
            }
        ),
    }


def tensorboard(context: Context) -> Document:
    """A TensorBoard on the run directory; later submissions use it, too."""
    backend = context.backend
    logs = inside(context.run_dir, context.spec.monitor.tensorboard_directory)
    container = {
        "name": "tensorboard",
        "image": backend.image,
        "imagePullPolicy": backend.image_pull_policy,
        "command": [
            backend.python,
            "-m",
            "tensorboard.main",
            f"--logdir={logs}",
            "--host=0.0.0.0",
            f"--port={BOARD_PORT}",
        ],
        "workingDir": ROOT,
        "ports": [{"name": "http", "containerPort": BOARD_PORT}],
        "readinessProbe": {"tcpSocket": {"port": BOARD_PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": limits(context, "1Gi")},
        "securityContext": container_security(context) or None,
        "volumeMounts": [{**data_mount(context), "readOnly": True}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(context, _board(context), lasting=True),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _of_board(context)},
            "template": {
                "metadata": pod_metadata(context, "tensorboard", lasting=True),
                "spec": {
                    "automountServiceAccountToken": False,
                    **placement(context, "launcher"),
                    "terminationGracePeriodSeconds": GRACE,
                    "containers": [present(container)],
                    "volumes": [data_volume(context)],
                },
            },
        },
    }


def tensorboard_service(context: Context) -> Document:
    """The service of TensorBoard."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(context, _board(context), lasting=True),
        "spec": {
            "selector": _of_board(context),
            "ports": [{"name": "http", "port": BOARD_PORT, "targetPort": BOARD_PORT}],
        },
    }


def _ranks(context: Context) -> Document:
    """Selects launcher and workers."""
    return {
        "matchLabels": {JOB_LABEL: context.job},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": ["launcher", "worker"]}],
    }


def _board(context: Context) -> str:
    return sibling(context.spec.name, "tensorboard")


def _of_board(context: Context) -> dict[str, str]:
    return {RUN_LABEL: context.spec.name, COMPONENT_LABEL: "tensorboard"}
