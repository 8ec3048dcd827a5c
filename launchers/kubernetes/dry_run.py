"""Having the API server check a run's documents before one of them is created.

Each document is sent as a dry run, and then each pod that would be created for it: the API server checks the service
account, the priority class, the runtime class, the security level and the namespace's limits only for a pod, and the
run would hang. What a dry run cannot check is not an error. Used by `object_creation` and the doctor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.quantity import parse
from ortflow.launchers.kubernetes.refusals import refusal

KEPT = "PersistentVolumeClaim"
"""Outlives its run, and is used unchanged if it exists."""
SHARED = ("Deployment", "Service")
"""Named after the run, not the job: one of an earlier submission may exist, which then serves this one."""
AT_ONCE = 4
"""Requests: each has its own connection, and a dry run takes longer than a connection."""
NOBODY = "00000000-0000-0000-0000-000000000000"
_QUOTA = re.compile(r"exceeded quota: \S+, requested: (?P<asked>.*), used: .*, limited: (?P<limits>.*)", re.DOTALL)


def dry_run(cluster: Cluster, documents: Sequence[Object]) -> None:
    """Have the API server check all of them. Raises the error for the first that it refuses."""

    def of_document(document: Object) -> None:
        try:
            cluster.create(document, dry_run=True)
        except Refused as error:
            if not (is_there(error) or _no_dry_run(error) or _role_to_come(error)):
                raise refusal(error) from error

    def of_pod(pod: Object) -> None:
        try:
            cluster.create(pod, dry_run=True)
        except Refused as error:
            if not (_no_dry_run(error) or _not_ours_to_make(error) or _may_wait(error)):
                raise refusal(error) from error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(of_document, rendered) for rendered in documents] + [
            pool.submit(of_pod, rendered) for rendered in pods(documents)
        ]
        for answer in futures:
            answer.result()


def is_there(error: Refused) -> bool:
    """Whether the only error is that the object already exists, which serves as well."""
    return error.code == 409 and error.reason == "AlreadyExists" and error.kind in (KEPT, *SHARED)


def pods(documents: Sequence[Object]) -> Iterator[Object]:
    """One of each kind of pod that controllers would create for the documents. Pure.

    A service account among the documents does not exist yet: such a pod is checked with the default account.
    """
    accounts = {objects.name(rendered) for rendered in documents if rendered["kind"] == "ServiceAccount"}
    for document in documents:
        name = objects.name(document)
        spec = document.get("spec") or {}
        templates = {name: spec["template"]} if "template" in spec else {}
        for kind, replica in (spec.get("mpiReplicaSpecs") or {}).items():
            templates[f"{name}-launcher" if kind == "Launcher" else f"{name}-worker-0"] = replica["template"]
        for pod, template in templates.items():
            metadata = {**(template.get("metadata") or {}), "name": pod, "ownerReferences": [_controller(document)]}
            if namespace := document["metadata"].get("namespace"):
                metadata["namespace"] = namespace
            inner = dict(template["spec"])
            if inner.get("serviceAccountName") in accounts:
                del inner["serviceAccountName"]
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": inner}


def _controller(document: Object) -> Object:
    """Some clusters refuse pods without one."""
    return {
        "apiVersion": document["apiVersion"], "kind": document["kind"], "name": objects.name(document), "uid": NOBODY,
        "controller": True,
    }  # fmt: skip


def _no_dry_run(error: Refused) -> bool:
    """Whether an admission webhook does not support dry runs."""
    return error.code == 400 and "does not support dry run" in error.message


def _role_to_come(error: Refused) -> bool:
    """Whether a binding lacks its role, which is among the documents. Missing rights are reported for the role."""
    return error.kind == "RoleBinding" and error.code in (403, 404)


def _not_ours_to_make(error: Refused) -> bool:
    """Whether the user may not create pods; the run's controllers may."""
    return error.code == 403 and re.search(r'is forbidden: User "[^"]*" cannot ', error.message) is not None


def _may_wait(error: Refused) -> bool:
    """Whether there may be quota, or the namespace's default account, a moment later."""
    if 'serviceaccount "default" not found' in error.message:
        return True
    match = _QUOTA.search(error.message)
    if match is None:
        return False
    requests, limits = ({key: parse(amount) for key, amount in _pairs(match[part])} for part in ("asked", "limits"))
    return all(amount <= limits.get(key, amount) for key, amount in requests.items())


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(","):
        key, _, amount = pair.strip().partition("=")
        yield key, amount
