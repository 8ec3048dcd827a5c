"""`ortflow doctor --backend kubernetes`: whether a run can work in this cluster, checked before submission.

Reads only and creates nothing: objects are sent as a dry run. A missing permission to read is also a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

from ortflow.launchers.findings import Finding, fault, from_error, ok, untested, warning
from ortflow.launchers.kubernetes import checks, objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.dry_run import dry_run
from ortflow.launchers.kubernetes.object_creation import require_operator
from ortflow.launchers.kubernetes.refusals import refusal
from ortflow.launchers.kubernetes.resources import GROUP, VERSION
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.spec.checks.nodes import permitted

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission

SLOW = 1.0
"""Seconds after which an answer is noticeably slow."""
NEEDED = (
    ("list", GROUP, "mpijobs"), ("get", GROUP, "mpijobs"), ("delete", GROUP, "mpijobs"), ("list", "", "pods"),
    ("get", "", "pods/log"), ("get", "batch", "jobs"),
)  # fmt: skip
USEFUL = (("list", "", "events"), ("delete", "", "pods"), ("patch", "batch", "jobs"))
LEASE = "mpi-operator"
AT_ONCE = 8


def examine_kubernetes(submission: Submission, *, of_user: bool, cluster: Cluster | None = None) -> Iterator[Finding]:
    """All findings, as each check ends; `of_user` False: the run stands for an unknown one."""
    backend = submission.spec.backends.kubernetes
    try:
        yield ok("client", f"the package kubernetes {metadata.version('kubernetes')}")
    except metadata.PackageNotFoundError:
        fix = "install it with `pip install 'ortflow[kubernetes]'`"
        yield fault("client", "the package kubernetes is not installed", fix)
        yield untested("everything else", "it needs the package")
        return
    try:
        if cluster is None:
            from ortflow.launchers.kubernetes.contexts import connect

            cluster = connect(backend.context, backend.namespace)
        yield _server(cluster)
    except OrtflowError as error:
        yield _finding("API server", error)
        yield untested("everything else", "it needs an answer from the API server")
        return
    for check in _checks(submission, cluster, of_user):
        try:
            yield from check()
        except Unreachable as error:
            yield fault("API server", str(error))
            return


def _checks(submission: Submission, cluster: Cluster, of_user: bool) -> Iterator[Callable[[], Iterator[Finding]]]:
    spec = submission.spec
    backend = spec.backends.kubernetes
    documents: list[Object] = []

    def run() -> Iterator[Finding]:
        from ortflow.launchers.kubernetes.launcher import KubernetesLauncher

        try:
            documents.extend(
                KubernetesLauncher().request(submission).documents(None, cluster.namespace, new_budget=False)
            )
        except UserError as error:
            yield from_error("run file", error)

    def mpijob() -> Object | None:
        return next((document for document in documents if document["kind"] == "MPIJob"), None)

    yield lambda: _operator(cluster)
    yield lambda: _namespace(cluster)
    if of_user:
        yield run
    yield lambda: _rights(cluster, documents)
    yield lambda: _quota(cluster, documents)
    yield lambda: _volume(cluster, submission, of_user)
    yield lambda: _nodes(cluster, mpijob(), permitted(spec)[0] + spec.resources.spares)
    yield lambda: _named(cluster, "priority class", "PriorityClass", backend.priority_class)
    yield lambda: _named(cluster, "runtime class", "RuntimeClass", backend.gpu.runtime_class)
    yield lambda: _named(cluster, "queue", "LocalQueue", backend.queue)
    for secret in (
        *backend.image_pull_secrets,
        *dict.fromkeys(secret_key.partition("/")[0] for secret_key in backend.secret_env.values()),
    ):
        yield lambda secret=secret: _named(cluster, "secret", "Secret", secret)  # type: ignore[misc]
    yield lambda: _dns(cluster)
    if of_user:
        yield lambda: _dry_run(cluster, documents)


def _finding(about: str, error: OrtflowError) -> Finding:
    error = refusal(error) if isinstance(error, Refused) else error
    return from_error(about, error) if isinstance(error, UserError) else fault(about, str(error))


def _server(cluster: Cluster) -> Finding:
    begun = time.monotonic()
    version = cluster.ask("/version")
    seconds = time.monotonic() - begun
    context = f", context {cluster.context}" if cluster.context else ", from inside"
    server = f"Kubernetes {version.get('gitVersion', '?').lstrip('v')} at {cluster.server}{context}"
    if seconds > SLOW:
        return warning("API server", f"{server}, answers in {seconds:.1f} s")
    return ok("API server", f"{server}, answers in {1000 * seconds:.0f} ms")


def _operator(cluster: Cluster) -> Iterator[Finding]:
    try:
        require_operator(cluster)
    except OrtflowError as error:
        yield _finding("MPIJob", error)
        return
    yield ok("MPIJob", f"{GROUP}/{VERSION} is served")
    try:
        leases = cluster.find_all("Lease", fields=f"metadata.name={LEASE}", everywhere=True)
    except Refused:
        yield untested("operator", "no permission to read its lease", "a run that has no pods after 15 s reports it")
        return
    yield checks.operator(leases, cluster.now())


def _namespace(cluster: Cluster) -> Iterator[Finding]:
    about = "namespace"
    try:
        namespace = cluster.find("Namespace", cluster.namespace)
    except Refused:
        yield untested(about, f"{cluster.namespace} cannot be read: no permission")
        return
    if namespace is None:
        yield fault(about, f"there is no {cluster.namespace}", f"`kubectl create namespace {cluster.namespace}`")
    elif (namespace.get("status") or {}).get("phase") == "Terminating":
        yield fault(about, f"{cluster.namespace} is being deleted")
    else:
        yield ok(about, cluster.namespace)


def _rights(cluster: Cluster, documents: Sequence[Object]) -> Iterator[Finding]:
    required_rights = [*dict.fromkeys([*NEEDED, *checks.documents_ask(documents)])]
    all_rights = [*required_rights, *USEFUL]

    def may(right: tuple[str, str, str]) -> bool:
        resource, _, subresource = right[2].partition("/")
        return cluster.may(right[0], right[1], resource, subresource)

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = dict(zip(all_rights, pool.map(may, all_rights), strict=True))
    except Refused as error:
        yield untested("rights", f"the API server does not report them: {error.message}")
        return
    names = {asked_right: f"{asked_right[0]} {asked_right[2]}" for asked_right in all_rights}
    yield from checks.rights(
        {names[asked_right]: answers[asked_right] for asked_right in required_rights},
        {names[asked_right]: answers[asked_right] for asked_right in USEFUL},
    )


def _quota(cluster: Cluster, documents: Sequence[Object]) -> Iterator[Finding]:
    if not documents:
        return
    try:
        quotas = cluster.find_all("ResourceQuota")
    except Refused:
        yield untested("quota", "quotas cannot be read: no permission")
        return
    ranges: list[Object] = []
    with suppress(Refused):
        ranges = cluster.find_all("LimitRange")
    yield from checks.quotas(quotas, documents, ranges)


def _volume(cluster: Cluster, submission: Submission, of_user: bool) -> Iterator[Finding]:
    volume, nodes = submission.spec.backends.kubernetes.volume, submission.spec.asked_nodes
    try:
        if volume.claim is not None:
            yield checks.claim(cluster.find("PersistentVolumeClaim", volume.claim), volume.claim, nodes)
        elif volume.create is not None:
            name = f"{submission.spec.name}-data"
            if (existing_claim := cluster.find("PersistentVolumeClaim", name)) is not None:
                yield checks.claim(existing_claim, name, nodes)
            else:
                yield checks.storage_class(cluster.find_all("StorageClass"), volume.create.storage_class)
        elif not of_user:
            yield checks.storage_class(cluster.find_all("StorageClass"), None)
    except Refused as error:
        yield untested("volume", str(refusal(error)))


def _nodes(cluster: Cluster, mpijob: Object | None, worker_count: int) -> Iterator[Finding]:
    try:
        nodes = cluster.find_all("Node")
    except Refused:
        yield untested("nodes", "no permission to read them: whether one can hold a worker shows when it is placed")
        return
    if mpijob is None:
        ready = sum(objects.holds(node, "Ready") for node in nodes)
        yield ok("nodes", f"{ready} of {len(nodes)} are ready") if ready else fault("nodes", "none is ready")
        return
    replicas = mpijob["spec"]["mpiReplicaSpecs"]
    pod = (replicas.get("Worker") or replicas["Launcher"])["template"]["spec"]
    yield from checks.fits(nodes, pod, worker_count, checks.worker_asks(mpijob))


def _named(cluster: Cluster, about: str, kind: str, name: str | None) -> Iterator[Finding]:
    """An object that the run file names and the cluster must have."""
    if name is None:
        return
    try:
        existing = cluster.find(kind, name)
    except Refused:
        yield untested(about, f"{name} cannot be read: no permission")
        return
    yield ok(about, name) if existing is not None else fault(about, f"there is no {name}")


def _dns(cluster: Cluster) -> Iterator[Finding]:
    about = "cluster DNS"
    with suppress(Refused):
        # CoreDNS's Service has kept the name of its predecessor.
        if cluster.find("Service", "kube-dns", "kube-system") is not None:
            labels = "kubernetes.io/service-name=kube-dns"
            ready = cluster.find_all("EndpointSlice", labels=labels, namespace="kube-system")
            if any(endpoint_slice.get("endpoints") for endpoint_slice in ready):
                yield ok(about, "kube-dns answers")
            else:
                yield warning(about, "the service kube-dns has no endpoints: workers would not be found by name")
            return
        yield warning(
            about, "there is no service kube-dns in kube-system", "workers are found by name: check that DNS works"
        )
        return
    yield untested(about, "namespace kube-system cannot be read: no permission")


def _dry_run(cluster: Cluster, documents: Sequence[Object]) -> Iterator[Finding]:
    if not documents:
        return
    try:
        dry_run(cluster, documents)
    except OrtflowError as error:
        yield _finding("dry run", error)
        return
    yield ok("dry run", f"the API server takes all {len(documents)} documents")
