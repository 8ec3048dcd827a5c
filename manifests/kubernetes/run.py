"""What an MPIJob needs around it: the run file, a service account, a claim for the volume. Trees."""

from __future__ import annotations

from ortflow.manifests.kubernetes.common import CLAIM, JOB, metadata, own
from ortflow.manifests.kubernetes.defaults import own_default
from ortflow.manifests.kubernetes.tree import Entries, Item, Node, Param, When, call, text


def config_map() -> Node:
    """The run file, and the files that travel with it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(text("%s-run", JOB)),
        "data": {"run.yaml": Param("text"), Entries(Param("contents")): Item()},
    }


def service_account() -> Node:
    """An account without rights: ranks ask nothing of the cluster."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(JOB),
        "automountServiceAccountToken": False,
    }


def claim() -> Node:
    """The claim for the run's volume, which outlives all submissions."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(CLAIM, lasting=True, notes={"helm.sh/resource-policy": "keep"}),
        "spec": {
            "accessModes": own_default("backends.kubernetes.volume.create.access_modes"),
            "storageClassName": When(own("volume.create.storage_class"), own("volume.create.storage_class")),
            "resources": {"requests": {"storage": call("quantity", own("volume.create.size"))}},
        },
    }
