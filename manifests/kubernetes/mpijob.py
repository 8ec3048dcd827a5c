"""The MPIJob, as Kubeflow's mpi-operator takes it (v2beta1). A tree.

Every field that the operator has a default for and that decides about success or cost is written: its defaults keep
workers, and their GPUs, after the end.
"""

from __future__ import annotations

from ortflow.manifests.kubernetes.common import JOB, metadata, own, users
from ortflow.manifests.kubernetes.pods import AS_WORKER, SSH_FOLDER, template
from ortflow.manifests.kubernetes.tree import All, Given, Is, Node, Not, Ref, Sum, When, call

API_VERSION, KIND = "kubeflow.org/v2beta1", "MPIJob"
NODES = Ref("resources.nodes")
WORKERS = When(AS_WORKER, Sum((NODES, -1)), NODES)


def mpijob() -> Node:
    """The document."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(
            JOB,
            more={"kueue.x-k8s.io/queue-name": Given(own("queue")), **users("labels")},
            notes=users("annotations"),
        ),
        "spec": {
            "mpiImplementation": When(Is(own("mpi"), "openmpi"), "OpenMPI", "MPICH"),
            "slotsPerWorker": Ref("resources.ranks_per_node"),
            "runLauncherAsWorker": AS_WORKER,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": SSH_FOLDER,
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": own("backoff_limit"),
                "activeDeadlineSeconds": When(own("deadline"), call("seconds", own("deadline"))),
                "ttlSecondsAfterFinished": Given(own("time_to_live")),
                "suspend": own("suspend"),
                "schedulingPolicy": When(own("gang"), _scheduling()),
            },
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": template("launcher")},
                # A launcher that is the only worker has no others.
                "Worker": When(
                    Not(All((AS_WORKER, Is(NODES, 1)))),
                    {"replicas": WORKERS, "restartPolicy": "OnFailure", "template": template("worker")},
                ),
            },
        },
    }


def _scheduling() -> Node:
    return {
        # The launcher is made when the workers are ready: a gang with it in would wait for ever.
        "minAvailable": WORKERS,
        "queue": Given(own("gang.queue")),
        "priorityClass": Given(own("priority_class")),
        "scheduleTimeoutSeconds": Given(own("gang.timeout_seconds")),
    }
