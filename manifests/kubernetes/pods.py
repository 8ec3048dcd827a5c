"""The pods of a run: launcher and workers, and what those of its options share with them. Trees."""

from __future__ import annotations

from typing import Any

from ortflow.manifests.kubernetes.common import (
    CLAIM,
    COMPONENT_LABEL,
    JOB,
    JOB_LABEL,
    MOUNT,
    RUN_FOLDER,
    SERVICE_ACCOUNT,
    labels,
    own,
    users,
)
from ortflow.manifests.kubernetes.tree import (
    All,
    Each,
    Entries,
    First,
    Given,
    Is,
    Item,
    Key,
    Node,
    Not,
    Param,
    Product,
    Ref,
    Some,
    When,
    call,
    text,
)

AS_WORKER = own("launcher_as_worker")
ROOT = Is(own("security.run_as_user"), 0)
GPUS = Product((Ref("resources.gpus_per_rank"), Ref("resources.ranks_per_node")))
PLUGINS = "scheduler-plugins-scheduler"
SSH_FOLDER = First((own("ssh_folder"), When(ROOT, "/root/.ssh", "/home/ortflow/.ssh")))


def template(component: str) -> Node:
    """The pod template of the launcher or of the workers."""
    launcher = component == "launcher"
    return {
        "metadata": {"labels": {**labels(component), **users("labels")}, "annotations": users("annotations")},
        "spec": {
            **placed(component),
            "nodeSelector": {**nodes(component)["nodeSelector"], **_gpu_nodes(component)},
            "restartPolicy": "Never" if launcher else "OnFailure",
            "runtimeClassName": When(GPUS, Given(own("gpu.runtime_class"))),
            "topologySpreadConstraints": [*([] if launcher else _spread()), Each(own("topology_spread"), Item())],
            "containers": [container("launcher", "keeper") if launcher else container("worker", "worker")],
            "volumes": volumes(),
        },
    }


def placed(component: str) -> dict[Any, Node]:
    """What the pods of launcher or workers have: who they are, where they may be, how they end."""
    return {
        "serviceAccountName": SERVICE_ACCOUNT,
        "automountServiceAccountToken": When(Not(own("service_account")), False),
        "imagePullSecrets": [Each(own("image_pull_secrets"), {"name": Item()})],
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": own("grace_seconds"),
        "priorityClassName": Given(own("priority_class")),
        "schedulerName": When(
            own("gang"),
            First((own("gang.scheduler_name"), When(Is(own("gang.scheduler"), "volcano"), "volcano", PLUGINS))),
        ),
        "affinity": When(own("affinity"), own("affinity")),
        **nodes(component),
    }


def nodes(component: str) -> dict[Any, Node]:
    """On which nodes the pods of a component may lie: those for all pods, and its own."""
    return {
        "nodeSelector": {
            Entries(own("node_selector")): Item(),
            Entries(own(f"{component}_node_selector")): Item(),
        },
        "tolerations": [Each(own("tolerations"), Item()), Each(own(f"{component}_tolerations"), Item())],
    }


def _gpu_nodes(component: str) -> dict[Any, Node]:
    """The label of nodes with the wanted kind of GPU, for pods that have some."""
    kind = Ref("resources.gpu_type")
    holds: tuple[Node, ...] = (GPUS, kind) if component == "worker" else (GPUS, kind, AS_WORKER)
    return {own("gpu.type_label"): When(All(holds), kind)}


def pod_security() -> Node:
    """Who the processes of a pod are."""
    return {
        "runAsUser": own("security.run_as_user"),
        "runAsGroup": own("security.run_as_group"),
        "runAsNonRoot": When(Not(ROOT), True),
        "fsGroup": own("security.fs_group"),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": own("security.seccomp")},
    }


def container_security() -> Node:
    """What the processes of a container may do; root's ssh daemon cannot serve without the usual capabilities."""
    return {
        "allowPrivilegeEscalation": When(Not(ROOT), False),
        "capabilities": {
            "drop": When(Not(ROOT), ["ALL"]),
            "add": When(own("security.capabilities"), own("security.capabilities")),
        },
    }


def container(name: str, module: str) -> Node:
    """The one container of a pod that ranks may run in."""
    launcher = name == "launcher"
    probe = {"tcpSocket": {"port": own("ssh_port")}}
    return {
        "name": name,
        "image": own("image"),
        "imagePullPolicy": Given(own("image_pull_policy")),
        "command": [own("python"), "-m", f"ortflow.launchers.kubernetes.{module}"],
        "env": environment(),
        "resources": When(AS_WORKER, _resources(), _small()) if launcher else _resources(),
        "securityContext": container_security(),
        # A bare connection costs the ssh daemon a process, so once it has answered it is asked more rarely.
        **(
            {}
            if launcher
            else {
                "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 300},
                "readinessProbe": {**probe, "periodSeconds": 10},
            }
        ),
        "volumeMounts": mounts(),
    }


SUBMISSION = "metadata.labels['batch.kubernetes.io/controller-uid']"


def environment() -> list[Node]:
    """The variables of launcher and workers: ours, the user's, those from secrets."""
    cache = text("%s/cache", MOUNT)
    return [
        {"name": "ORTFLOW_RUN_FILE", "value": f"{RUN_FOLDER}/run.yaml"},
        {"name": "ORTFLOW_LAUNCHER", "value": "kubernetes"},
        {"name": "ORTFLOW_JOB", "value": JOB},
        {"name": "ORTFLOW_MOUNT", "value": MOUNT},
        {"name": "ORTFLOW_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "ORTFLOW_SSH_PORT", "value": text("%s", own("ssh_port"))},
        # Of the launcher's Job: another MPIJob of the same name is another submission.
        {"name": "ORTFLOW_SUBMISSION", "valueFrom": {"fieldRef": {"fieldPath": SUBMISSION}}},
        When(Param("new_budget"), {"name": "ORTFLOW_NEW_BUDGET", "value": "1"}),
        When(Param("fresh"), {"name": "ORTFLOW_FRESH", "value": "1"}),
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "XDG_CACHE_HOME", "value": cache},
        # On a full disk CPython up to 3.12.7 leaves half of a compiled module (its issue 126606), which cannot be
        # imported from then on. An image has its modules compiled.
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        {"name": "CUDA_CACHE_PATH", "value": text("%s/cuda", cache)},
        # The kubelet would put variables in place of $(NAME).
        Each(own("env"), {"name": Key(), "value": call("literal", Item())}),
        Each(
            own("secret_env"),
            {
                "name": Key(),
                "valueFrom": {"secretKeyRef": {"name": call("before", Item(), "/"), "key": call("after", Item(), "/")}},
            },
        ),
    ]


def _resources() -> Node:
    """A worker's: requests equal to limits, so that it is the last to be evicted."""
    cpus = Ref("resources.cpus_per_rank")
    amounts: dict[Any, Node] = {
        "cpu": When(own("worker_cpu"), own("worker_cpu"), When(cpus, Product((cpus, Ref("resources.ranks_per_node"))))),
        "memory": When(Ref("resources.memory"), call("quantity", Ref("resources.memory"))),
        "ephemeral-storage": When(own("ephemeral_storage"), call("quantity", own("ephemeral_storage"))),
        own("gpu.resource"): When(GPUS, GPUS),
        Entries(own("extended_resources")): Item(),
    }
    return {"requests": amounts, "limits": amounts}


def _small() -> Node:
    memory = call("quantity", own("launcher_resources.memory"))
    return {"requests": {"cpu": own("launcher_resources.cpu"), "memory": memory}, "limits": {"memory": memory}}


def run_mount() -> Node:
    """The mount of the run file."""
    return {"name": "run", "mountPath": RUN_FOLDER, "readOnly": True}


def run_volume() -> Node:
    """The run file, and the files that travel with it."""
    return {"name": "run", "configMap": {"name": text("%s-run", JOB), "items": _items()}}


def data_mount() -> dict[Any, Node]:
    """The mount of the run's volume."""
    return {"name": "data", "mountPath": MOUNT, "subPath": Given(own("volume.sub_path"))}


def mounts() -> list[Node]:
    """What launcher and workers see."""
    return [
        run_mount(),
        data_mount(),
        {"name": "shm", "mountPath": "/dev/shm"},
        Each(
            own("volumes"),
            {
                "name": Item("name"),
                "mountPath": Item("mount"),
                "readOnly": When(Item("read_only"), True),
                "subPath": Given(Item("sub_path")),
            },
        ),
    ]


def volumes() -> list[Node]:
    """The volumes of launcher and workers."""
    shared = own("shared_memory")
    return [
        run_volume(),
        data_volume(),
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": When(shared, call("quantity", shared))},
        },
        Each(own("volumes"), {"name": Item("name"), Entries(Item("source")): Item()}),
    ]


def _items() -> list[Node]:
    return [
        {"key": "run.yaml", "path": "run.yaml"},
        Each(own("files"), {"key": text("file-%s", Key()), "path": text("files/%s", Item())}),
    ]


def data_volume() -> Node:
    """The run's volume."""
    folder, nfs, s3 = own("volume.host_path"), own("volume.nfs"), own("volume.s3")
    claim, create = own("volume.claim"), own("volume.create")
    return {
        "name": "data",
        "persistentVolumeClaim": When(Some((claim, create)), {"claimName": First((claim, CLAIM))}),
        "hostPath": When(folder, {"path": folder, "type": "Directory"}),
        "nfs": When(nfs, {"server": own("volume.nfs.server"), "path": own("volume.nfs.path")}),
        "csi": When(
            s3,
            {
                "driver": own("volume.s3.driver"),
                "volumeAttributes": When(own("volume.s3.attributes"), own("volume.s3.attributes")),
                "nodePublishSecretRef": When(own("volume.s3.secret"), {"name": own("volume.s3.secret")}),
            },
        ),
        "emptyDir": When(own("volume.empty_dir"), {}),
    }


def _spread() -> list[Node]:
    return [
        When(
            Not(Is(own("spread"), "none")),
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": When(Is(own("spread"), "require"), "DoNotSchedule", "ScheduleAnyway"),
                "labelSelector": {"matchLabels": {JOB_LABEL: JOB, COMPONENT_LABEL: "worker"}},
            },
        )
    ]
