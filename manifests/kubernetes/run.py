"""The objects around an MPIJob: the run file, a service account, a claim for the volume. Pure."""

from __future__ import annotations

from ortflow.manifests.kubernetes.common import Context, Document, metadata, present
from ortflow.manifests.kubernetes.names import quantity


def config_map(context: Context) -> Document:
    """The run file, and the files beside it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(context, f"{context.job}-run"),
        "data": {"run.yaml": context.run_file, **context.contents},
    }


def service_account(context: Context) -> Document:
    """An account without permissions: ranks do not use the cluster's API."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(context, context.job),
        "automountServiceAccountToken": False,
    }


def claim(context: Context) -> Document:
    """The claim for the run's volume, which outlives all submissions."""
    create = context.backend.volume.create
    assert create is not None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        # `helm uninstall` would delete the claim, and with it the checkpoints.
        "metadata": metadata(context, context.claim, lasting=True, annotations={"helm.sh/resource-policy": "keep"}),
        "spec": present(
            {
                "accessModes": [*create.access_modes],
                "storageClassName": create.storage_class,
                "resources": {"requests": {"storage": quantity(create.size)}},
            }
        ),
    }
