"""Keeping the workers of an MPIJob off nodes. Pure.

The operator (mpi-operator 0.6) creates each worker from the MPIJob's template at that moment, and compares neither with
the other afterwards. So a changed template changes no pod that is there, and a worker that is deleted comes back by
the new one. The template of the launcher's pod cannot be changed: it is that of a batch Job.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

from ortflow.launchers.kubernetes.api import Object

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def avoided(mpijob: Object) -> set[str]:
    """The nodes that the workers of an MPIJob cannot be on, by what `avoiding` has added."""
    terms = _terms((_worker_template(mpijob).get("spec") or {}).get("affinity") or {})
    nodes = [{field["values"][0] for field in term.get("matchFields") or [] if _excludes(field)} for term in terms]
    return set.intersection(*nodes) if nodes else set()


def change(mpijob: Object, nodes: Collection[str]) -> Object:
    """The change of an MPIJob after which new workers are on none of these nodes, besides all else that is asked."""
    affinity = (_worker_template(mpijob).get("spec") or {}).get("affinity") or {}
    worker = {"template": {"spec": {"affinity": avoiding(affinity, nodes)}}}
    return {"spec": {"mpiReplicaSpecs": {"Worker": worker}}}


def avoiding(affinity: Object, nodes: Collection[str]) -> Object:
    """A pod's affinity without these nodes."""
    whole = copy.deepcopy(affinity)
    node_affinity = whole.setdefault("nodeAffinity", {})
    # Terms are alternatives, and a field of a term takes one value. Names of nodes are no label.
    terms = _terms(whole) or [{}]
    for term in terms:
        fields = [field for field in term.get("matchFields") or [] if not _excludes(field)]
        fields += [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
        term["matchFields"] = fields
    node_affinity[_REQUIRED] = {"nodeSelectorTerms": terms}
    return whole


def _worker_template(mpijob: Object) -> Object:
    replicas = (mpijob.get("spec") or {}).get("mpiReplicaSpecs") or {}
    template: Object = (replicas.get("Worker") or {}).get("template") or {}
    return template


def _terms(affinity: Object) -> list[Object]:
    required = (affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return list(required.get("nodeSelectorTerms") or [])


def _excludes(field: Object) -> bool:
    return field.get("key") == "metadata.name" and field.get("operator") == "NotIn" and len(field["values"]) == 1
