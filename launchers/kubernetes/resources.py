"""Where the API server has each kind of object: versions, plurals, paths. Pure.

Fixed here, so that no request is needed to discover them.
"""

from __future__ import annotations

from urllib.parse import quote

GROUP, VERSION, CRD = "kubeflow.org", "v2beta1", "mpijobs.kubeflow.org"
"""Of the mpi-operator."""
PLURALS = {
    "NetworkPolicy": "networkpolicies", "Endpoints": "endpoints", "StorageClass": "storageclasses",
    "PriorityClass": "priorityclasses", "RuntimeClass": "runtimeclasses", "LocalQueue": "localqueues",
}  # fmt: skip
"""Plurals that are not the kind in lower case and an s."""
VERSIONS = {
    "Job": "batch/v1", "Deployment": "apps/v1", "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1", "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1", "MPIJob": "kubeflow.org/v2beta1", "StorageClass": "storage.k8s.io/v1",
    "PriorityClass": "scheduling.k8s.io/v1", "RuntimeClass": "node.k8s.io/v1", "Lease": "coordination.k8s.io/v1",
    "EndpointSlice": "discovery.k8s.io/v1",
}  # fmt: skip
"""API versions of kinds that are not in v1."""
CLUSTER_WIDE = frozenset({"Namespace", "Node", "StorageClass", "PriorityClass", "RuntimeClass", "PersistentVolume"})


def plural(kind: str) -> str:
    """The name of a kind in paths and rights."""
    return PLURALS.get(kind, f"{kind.lower()}s")


def path_of(kind: str, name: str, version: str, namespace: str | None) -> str:
    """The path of an object, or of all of a kind if `name` is empty; in all namespaces if `namespace` is None."""
    prefix = "" if namespace is None or kind in CLUSTER_WIDE else f"/namespaces/{quote(namespace)}"
    return f"/{'apis' if '/' in version else 'api'}/{version}{prefix}/{plural(kind)}" + (
        f"/{quote(name)}" if name else ""
    )
