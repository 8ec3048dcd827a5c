"""Creating a run's objects, all or none.

Errors of the API server, its policies and quotas are reported before anything is created (`dry_run`).
Then they are created in order, the MPIJob last, which becomes their owner: deleting the MPIJob deletes them, except the
claim of the volume. If a step fails, what was created is deleted.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused
from ortflow.launchers.kubernetes.dry_run import AT_ONCE, KEPT, SHARED, dry_run, is_there
from ortflow.launchers.kubernetes.refusals import refusal
from ortflow.launchers.kubernetes.resources import CRD, GROUP, VERSION
from ortflow.workflow.errors import OrtflowError, UserError

SWEPT = (
    "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Job", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    "Service",
)  # fmt: skip
FOUND = "found"
"""Marks objects that existed before."""


def new_suffix() -> str:
    """A suffix that makes a job's name unique."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(6))


def require_operator(cluster: Cluster) -> None:
    """Raise UserError if the cluster has no MPIJobs, or only those of the old operator."""
    try:
        if cluster.serves_mpijobs(VERSION):
            return
        if cluster.serves_mpijobs("v1"):
            raise UserError(
                f"the cluster's {CRD} is that of the old training-operator: it serves v1, not {VERSION}",
                fix="have an administrator install the mpi-operator in its place; the two cannot coexist",
            )
    except Refused as error:
        raise refusal(error) from error
    raise UserError(
        f"the cluster knows no MPIJobs: the mpi-operator ({CRD}, {VERSION}) is not installed",
        fix="have an administrator install it: docs/kubernetes.md, 'From an empty cluster'",
    )


def create(cluster: Cluster, documents: Sequence[Object]) -> Object:
    """Create them all; returns the MPIJob. Raises UserError if the API server refuses one; then nothing is left."""
    ordered = sorted(documents, key=lambda item: item["kind"] == "MPIJob")
    dry_run(cluster, ordered)
    created: list[Object] = []
    try:
        for document in ordered:
            _make(cluster, document, created)
        mpijob = created[-1]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda thing: _give(cluster, thing, mpijob), created[:-1]))
    except BaseException as error:
        leftovers = _delete_created(cluster, created)
        if isinstance(error, Refused):
            raise refusal(error) from error
        if leftovers and isinstance(error, OrtflowError):
            names = " ".join(f"{thing['kind'].lower()}/{objects.name(thing)}" for thing in leftovers)
            namespace = objects.namespace(leftovers[0], cluster)
            raise OrtflowError(f"{error}; what may be left: `kubectl delete -n {namespace} {names}`") from error
        raise
    return mpijob


def _make(cluster: Cluster, document: Object, created: list[Object]) -> None:
    try:
        created.append(cluster.create(document))
    except Refused as error:
        if not is_there(error):
            raise
        if document["kind"] in SHARED:
            existing = cluster.get(str(document["kind"]), objects.name(document), document["metadata"].get("namespace"))
            created.insert(0, {**existing, "kind": document["kind"], FOUND: True})
    except BaseException:
        # It may have been created before the answer was lost. What may have existed before stays.
        if document["kind"] not in (KEPT, *SHARED):
            created.append(document)
        raise


def _give(cluster: Cluster, thing: Object, mpijob: Object) -> None:
    """Make the MPIJob the owner, so that the object is deleted with it."""
    if thing["kind"] == KEPT:
        return
    owners = [*(thing["metadata"].get("ownerReferences") or []), owner(mpijob)]
    change = {"metadata": {"ownerReferences": owners}}
    cluster.patch(str(thing["kind"]), objects.name(thing), change, thing["metadata"].get("namespace"))


def owner(mpijob: Object) -> Object:
    """The reference with which objects belong to an MPIJob."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MPIJob",
        "name": objects.name(mpijob),
        "uid": objects.uid(mpijob),
    }


def _delete_created(cluster: Cluster, created: Sequence[Object]) -> list[Object]:
    """Delete what was created, the newest first; returns what could not be deleted."""
    leftovers = []
    for thing in reversed(created):
        if thing.get(FOUND):
            continue
        try:
            cluster.delete(
                str(thing["kind"]),
                objects.name(thing),
                thing["metadata"].get("namespace"),
                uid=objects.uid(thing) or None,
            )
        except OrtflowError:
            leftovers.append(thing)
    return leftovers


def sweep(cluster: Cluster, namespace: str, job: str) -> None:
    """Delete objects of a job without an owner, as `kubectl apply` leaves them; kinds that may not be listed stay."""
    for kind in SWEPT:
        with suppress(Refused):
            for thing in cluster.find_all(kind, labels=f"{objects.OURS},{objects.JOB}={job}", namespace=namespace):
                if not thing["metadata"].get("ownerReferences"):
                    cluster.delete(kind, objects.name(thing), namespace, uid=objects.uid(thing))
