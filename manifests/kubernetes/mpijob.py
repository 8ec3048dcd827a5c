"""The MPIJob for Kubeflow's mpi-operator (v2beta1). Pure.

Every field that affects success or cost is written, although the operator has a default: its defaults keep workers, and
their GPUs, after the end.
"""

from __future__ import annotations

from ortflow.manifests.kubernetes.common import Context, Document, metadata, present
from ortflow.manifests.kubernetes.names import seconds
from ortflow.manifests.kubernetes.pods import ssh_folder, template
from ortflow.workflow.spec.checks.nodes import permitted

API_VERSION, KIND = "kubeflow.org/v2beta1", "MPIJob"


def mpijob(context: Context) -> Document:
    """The document."""
    backend, workers = context.backend, _workers(context)
    # With OnFailure the launcher pod and its log are removed when backoffLimit is exceeded (mpi-operator #354).
    replicas = {"Launcher": {"replicas": 1, "restartPolicy": "Never", "template": template(context, "launcher")}}
    if workers:
        replicas["Worker"] = {
            "replicas": workers,
            # With Never a worker that was killed is never made again, and every retry fails (mpi-operator 0.8.2).
            "restartPolicy": "OnFailure",
            "template": template(context, "worker"),
        }
    queue = {"kueue.x-k8s.io/queue-name": backend.queue} if backend.queue is not None else {}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(
            context, context.job, extra_labels={**queue, **backend.labels}, annotations=backend.annotations
        ),
        "spec": {
            "mpiImplementation": "OpenMPI" if backend.mpi == "openmpi" else "MPICH",
            "slotsPerWorker": context.spec.resources.ranks_per_node,
            "runLauncherAsWorker": backend.launcher_as_worker,
            # A run that chooses among its nodes starts without the workers that are missing for too long.
            "launcherCreationPolicy": "AtStartup" if context.spec.chooses_nodes else "WaitForWorkersReady",
            "sshAuthMountPath": ssh_folder(context),
            "runPolicy": present(
                {
                    "cleanPodPolicy": "Running",
                    "backoffLimit": backend.backoff_limit,
                    "activeDeadlineSeconds": None if backend.deadline is None else seconds(backend.deadline),
                    "ttlSecondsAfterFinished": backend.time_to_live,
                    "suspend": backend.suspend,
                    "schedulingPolicy": _scheduling(context),
                }
            ),
            "mpiReplicaSpecs": replicas,
        },
    }


def _workers(context: Context) -> int:
    """Number of pods besides the launcher's."""
    return context.spec.asked_nodes - context.backend.launcher_as_worker


def _scheduling(context: Context) -> Document | None:
    gang = context.backend.gang
    if gang is None:
        return None
    return present(
        {
            # The launcher is created when the workers are ready: a gang that includes it would wait forever.
            "minAvailable": permitted(context.spec)[0] - context.backend.launcher_as_worker,
            "queue": gang.queue,
            "priorityClass": context.backend.priority_class,
            "scheduleTimeoutSeconds": gang.timeout_seconds,
        }
    )
