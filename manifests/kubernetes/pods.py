"""The pods of a run: launcher and workers, and what other pods of the run share with them. Pure."""

from __future__ import annotations

from typing import Any, Literal

from ortflow.manifests.kubernetes.common import (
    COMPONENT_LABEL,
    JOB_LABEL,
    RUN_FOLDER,
    Context,
    Document,
    pod_metadata,
    present,
)
from ortflow.manifests.kubernetes.names import literal, quantity

Component = Literal["launcher", "worker"]
_SCHEDULERS = {"volcano": "volcano", "scheduler-plugins": "scheduler-plugins-scheduler"}
"""Name of each kind of scheduler where it is installed as its documentation says."""
_SPREADS = {"prefer": "ScheduleAnyway", "require": "DoNotSchedule"}

NO_RANKS = "ORTFLOW_NO_RANKS"
"""Variable of a launcher that is not a worker, too."""
ROOT = "/"
"""`python -m` imports modules of the current folder before its own; an image's may be a volume that users write to."""
SUBMISSION = "metadata.labels['batch.kubernetes.io/controller-uid']"


def template(context: Context, component: Component) -> Document:
    """The pod template of the launcher or of the workers."""
    backend, launcher = context.backend, component == "launcher"
    spread = [] if launcher else _spread(context)
    pod_placement = placement(context, component)
    return {
        "metadata": pod_metadata(context, component),
        "spec": present(
            {
                "serviceAccountName": context.service_account,
                "automountServiceAccountToken": None if backend.service_account else False,
                **pod_placement,
                "nodeSelector": {**pod_placement.get("nodeSelector", {}), **_gpu_nodes(context, component)} or None,
                "terminationGracePeriodSeconds": backend.grace_seconds,
                "priorityClassName": backend.priority_class,
                "schedulerName": _scheduler(context),
                "affinity": backend.affinity or None,
                "restartPolicy": "Never" if launcher else "OnFailure",
                "runtimeClassName": backend.gpu.runtime_class if _gpus(context) else None,
                "topologySpreadConstraints": [*spread, *backend.topology_spread] or None,
                "containers": [_container(context, component)],
                "volumes": _volumes(context),
            }
        ),
    }


def placement(context: Context, component: Component) -> Document:
    """Security context, image pull secrets and node placement of a pod."""
    backend, launcher = context.backend, component == "launcher"
    selector = backend.launcher_node_selector if launcher else backend.worker_node_selector
    tolerations = backend.launcher_tolerations if launcher else backend.worker_tolerations
    return present(
        {
            "imagePullSecrets": [{"name": name} for name in backend.image_pull_secrets] or None,
            "securityContext": _pod_security(context),
            "nodeSelector": {**backend.node_selector, **selector} or None,
            "tolerations": [*backend.tolerations, *tolerations] or None,
        }
    )


def container_security(context: Context) -> Document:
    """Security context of a container."""
    security = context.backend.security
    # Root's ssh daemon cannot serve without the usual capabilities.
    root = security.run_as_user == 0
    capabilities = present({"drop": None if root else ["ALL"], "add": security.capabilities or None})
    return present({"allowPrivilegeEscalation": None if root else False, "capabilities": capabilities or None})


def run_mount() -> Document:
    """The mount of the run file."""
    return {"name": "run", "mountPath": RUN_FOLDER, "readOnly": True}


def run_volume(context: Context) -> Document:
    """The run file, and the files beside it."""
    items = [{"key": "run.yaml", "path": "run.yaml"}]
    items += [{"key": f"file-{place}", "path": f"files/{path}"} for place, path in enumerate(context.backend.files)]
    return {"name": "run", "configMap": {"name": f"{context.job}-run", "items": items}}


def data_mount(context: Context) -> Document:
    """The mount of the run's volume."""
    volume = context.backend.volume
    return present({"name": "data", "mountPath": volume.mount, "subPath": volume.sub_path})


def data_volume(context: Context) -> Document:
    """The run's volume."""
    volume = context.backend.volume
    source: Document
    if volume.claim or volume.create:
        source = {"persistentVolumeClaim": {"claimName": volume.claim or context.claim}}
    elif volume.host_path:
        # Without a type the kubelet does not check that the folder is there.
        source = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    elif volume.nfs:
        source = {"nfs": {"server": volume.nfs.server, "path": volume.nfs.path}}
    elif volume.s3:
        secret = {"name": volume.s3.secret} if volume.s3.secret else None
        attributes = volume.s3.attributes or None
        csi = {"driver": volume.s3.driver, "volumeAttributes": attributes, "nodePublishSecretRef": secret}
        source = {"csi": present(csi)}
    else:
        source = {"emptyDir": {}}
    return {"name": "data", **source}


def _pod_security(context: Context) -> Document:
    security = context.backend.security
    return present(
        {
            "runAsUser": security.run_as_user,
            "runAsGroup": security.run_as_group,
            "runAsNonRoot": True if security.run_as_user else None,
            "fsGroup": security.fs_group,
            # By default the kubelet changes the group of all files at each mount, slowly where there are many.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": security.seccomp},
        }
    )


def _gpus(context: Context) -> int:
    """GPUs of a pod that ranks run in."""
    return context.spec.resources.gpus_per_rank * context.spec.resources.ranks_per_node


def _gpu_nodes(context: Context, component: Component) -> dict[str, str]:
    """The node label of the requested kind of GPU, for pods with GPUs."""
    kind, ranks = context.spec.resources.gpu_type, component == "worker" or context.backend.launcher_as_worker
    return {context.backend.gpu.type_label: kind} if kind and ranks and _gpus(context) else {}


def _scheduler(context: Context) -> str | None:
    gang = context.backend.gang
    if gang is None:
        return None
    return gang.scheduler_name or _SCHEDULERS[gang.scheduler]


def _spread(context: Context) -> list[Document]:
    if context.backend.spread == "none":
        return []
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": _SPREADS[context.backend.spread],
            "labelSelector": {"matchLabels": {JOB_LABEL: context.job, COMPONENT_LABEL: "worker"}},
        }
    ]


def _container(context: Context, component: Component) -> Document:
    """The one container of a pod that ranks may run in."""
    backend, launcher = context.backend, component == "launcher"
    module = "run_supervisor" if launcher else "worker"
    small = launcher and not backend.launcher_as_worker
    probe = {"tcpSocket": {"port": backend.ssh_port}}
    return present(
        {
            "name": component,
            "image": backend.image,
            "imagePullPolicy": backend.image_pull_policy,
            "command": [backend.python, "-m", f"ortflow.launchers.kubernetes.{module}"],
            "workingDir": ROOT,
            "env": [*_environment(context), *([] if not small else [{"name": NO_RANKS, "value": "1"}])],
            "resources": _launcher_resources(context) if small else _rank_resources(context),
            "securityContext": container_security(context) or None,
            # A bare connection costs the ssh daemon a process, so the probe is less frequent once it has answered.
            "startupProbe": None if launcher else {**probe, "periodSeconds": 1, "failureThreshold": 300},
            "readinessProbe": None if launcher else {**probe, "periodSeconds": 10},
            "volumeMounts": _mounts(context),
        }
    )


def _environment(context: Context) -> list[Document]:
    """The variables of launcher and workers: ortflow's, the user's, and those from secrets."""
    backend = context.backend
    cache = f"{backend.volume.mount}/cache"
    return [
        {"name": "ORTFLOW_RUN_FILE", "value": f"{RUN_FOLDER}/run.yaml"},
        {"name": "ORTFLOW_LAUNCHER", "value": "kubernetes"},
        {"name": "ORTFLOW_JOB", "value": context.job},
        {"name": "ORTFLOW_MOUNT", "value": backend.volume.mount},
        {"name": "ORTFLOW_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        # On the node's network a pod's host name is the node's, which no DNS may know.
        {"name": "ORTFLOW_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ORTFLOW_POD_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "ORTFLOW_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ORTFLOW_SSH_PORT", "value": str(backend.ssh_port)},
        {"name": "ORTFLOW_SSH_FOLDER", "value": ssh_folder(context)},
        # UID of the launcher's Job: another MPIJob of the same name is another submission.
        {"name": "ORTFLOW_SUBMISSION", "valueFrom": {"fieldRef": {"fieldPath": SUBMISSION}}},
        *([{"name": "ORTFLOW_NEW_BUDGET", "value": "1"}] if context.new_budget else []),
        *([{"name": "ORTFLOW_FRESH", "value": "1"}] if context.fresh else []),
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "XDG_CACHE_HOME", "value": cache},
        # On a full disk, CPython up to 3.12.7 leaves a truncated compiled module (its issue 126606), which then cannot
        # be imported. An image contains its modules compiled.
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        {"name": "CUDA_CACHE_PATH", "value": f"{cache}/cuda"},
        # The kubelet would expand $(NAME).
        *({"name": name, "value": literal(value)} for name, value in sorted(backend.env.items())),
        *({"name": name, "valueFrom": _secret(key)} for name, key in sorted(backend.secret_env.items())),
    ]


def _secret(place: str) -> Document:
    name, _, key = place.partition("/")
    return {"secretKeyRef": {"name": name, "key": key}}


def _rank_resources(context: Context) -> Document | None:
    """Resources of a pod with ranks: requests equal to limits, so that it is the last to be evicted."""
    backend, resources = context.backend, context.spec.resources
    cpu: str | int | None = backend.worker_cpu
    if cpu is None and resources.cpus_per_rank:
        cpu = resources.cpus_per_rank * resources.ranks_per_node
    amounts: dict[str, Any] = present(
        {
            "cpu": cpu,
            "memory": resources.memory and quantity(resources.memory),
            "ephemeral-storage": backend.ephemeral_storage and quantity(backend.ephemeral_storage),
            backend.gpu.resource: _gpus(context) or None,
            **backend.extended_resources,
        }
    )
    return {"requests": amounts, "limits": amounts} if amounts else None


def _launcher_resources(context: Context) -> Document:
    section = context.backend.launcher_resources
    memory = quantity(section.memory)
    return {"requests": {"cpu": section.cpu, "memory": memory}, "limits": limits(context, memory)}


def limits(context: Context, memory: str) -> Document:
    """Limits of a container without ranks."""
    return present({"cpu": context.backend.launcher_resources.cpu_limit, "memory": memory})


def ssh_folder(context: Context) -> str:
    """Where the operator mounts the ssh keys."""
    return context.backend.ssh_folder or (
        "/home/ortflow/.ssh" if context.backend.security.run_as_user else "/root/.ssh"
    )


def _mounts(context: Context) -> list[Document]:
    volume_mounts = [
        {
            "name": volume.name,
            "mountPath": volume.mount,
            "readOnly": volume.read_only or None,
            "subPath": volume.sub_path,
        }
        for volume in context.backend.volumes
    ]
    return [run_mount(), data_mount(context), {"name": "shm", "mountPath": "/dev/shm"}, *map(present, volume_mounts)]


def _volumes(context: Context) -> list[Document]:
    shared = context.backend.shared_memory
    memory = present({"medium": "Memory", "sizeLimit": shared and quantity(shared)})
    return [
        run_volume(context),
        data_volume(context),
        # A container's own /dev/shm has 64 MiB, too few for NCCL.
        {"name": "shm", "emptyDir": memory},
        *({"name": volume.name, **volume.source} for volume in context.backend.volumes),
    ]
