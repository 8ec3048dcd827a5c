"""Submitting a run to Kubernetes, or starting it again where it is suspended.

Called by the launcher. Nothing is sent until run file, record directory and cluster agree that the run may start:
`object_creation` then creates its objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.object_creation import create, new_suffix, require_operator, sweep
from ortflow.launchers.kubernetes.objects import directory, name, over
from ortflow.launchers.kubernetes.payload import keep
from ortflow.launchers.kubernetes.place import Place, is_real, read_place, write_place
from ortflow.launchers.kubernetes.refusals import in_a_sentence, refusal
from ortflow.launchers.kubernetes.request import KubernetesRequest
from ortflow.launchers.kubernetes.snapshot import mpijobs, take_snapshot
from ortflow.launchers.kubernetes.status import suspended
from ortflow.launchers.records import State, state
from ortflow.launchers.run_directory_lock import Opened, opened
from ortflow.launchers.stop import interruptible
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock


def submit(request: KubernetesRequest, links: Links) -> str:
    """Create the run's objects. Raises UserError if the cluster or the record directory refuses it."""
    run, backend = request.submission.run, request.payload.spec.backends.kubernetes
    # Report invalid values before the first request.
    own_documents = request.documents(None, backend.namespace or "default", new_budget=False)
    before = read_place(run)
    # A resumed run stays in its namespace, even if kubectl's has changed.
    pinned = before.namespace if before is not None and request.submission.source is None else None
    cluster = links.connect(backend.context or (before.context if before else None), backend.namespace or pinned)
    mpijobs_there = _retry(links.clock, request.submission.retry, lambda: _of_name(cluster, request.payload.spec.name))
    place = Place(cluster.namespace, request.payload.spec.name, context=cluster.context)
    if before is not None and _is_elsewhere(links, before, cluster):
        _refuse_losing_record(links, run, before, cluster, fresh=request.submission.fresh)
    if request.submission.source is None and before is not None and _unsuspend(request, cluster, before):
        return before.handle
    _settle(links, run, cluster, place, own_documents, mpijobs_there)
    # The pods have their own run directory: the record directory must not be in the run file.
    spec = request.payload.spec.model_copy(update={"run_dir": None})
    with interruptible(), opened(replace(request.submission, spec=spec)) as directory:
        if directory.finished:
            return (read_place(run) or place).handle
        documents = request.documents(new_suffix(), cluster.namespace, new_budget=_new_budget(request, directory))
        return _place(request, directory, cluster, place, documents)


def _unsuspend(request: KubernetesRequest, cluster: Cluster, place: Place) -> bool:
    """Start a suspended MPIJob; False if there is none, or if a queue starts it. Raises UserError."""
    with in_a_sentence():
        view = take_snapshot(cluster, place, closely=False)
        if not suspended(view):
            return False
        if request.submission.overrides:
            raise UserError(
                f"the run {place.name} is suspended as MPIJob {view.name}, whose values are fixed",
                fix=f"resume it without new values, or `ortflow cancel {place.at(view.name).handle}` it first",
            )
        start = {"spec": {"runPolicy": {"suspend": False}}}
        cluster.patch("MPIJob", view.name, start, place.namespace)
    return True


def _refuse_losing_record(links: Links, run: RunDir, before: Place, cluster: Cluster, *, fresh: bool) -> None:
    """Raise UserError if the record of a run elsewhere would be lost."""
    active = links.status(run).state.active
    if fresh and not active:
        return
    raise UserError(
        f"{run.root} is the record of the run {before.name} in namespace {before.namespace}"
        + (f" of context {before.context}" if before.context != cluster.context else ""),
        where="backends.kubernetes.namespace",
        fix="give this run another name or another --runs-dir"
        + ("" if active else f", or --fresh, which keeps that record as {run.root.name}.1"),
    )


def _is_elsewhere(links: Links, before: Place, cluster: Cluster) -> bool:
    """Whether a run's record names another namespace or cluster than the selected one."""
    if before.namespace != cluster.namespace:
        return True
    if before.context in (None, cluster.context):
        return False
    try:
        return links.connect(before.context, before.namespace).server != cluster.server
    except UserError:  # the context no longer exists
        return True


def _settle(
    links: Links,
    run: RunDir,
    cluster: Cluster,
    place: Place,
    own_documents: Sequence[Object],
    mpijobs: Sequence[Object],
) -> None:
    """Raise UserError if the run is active in an existing MPIJob; delete one that only seems to be."""
    volume = next(directory(document) for document in own_documents if document["kind"] == "MPIJob")
    with in_a_sentence():
        for mpijob in mpijobs:
            if over(mpijob):
                continue
            run_status = links.status_of_active(run, cluster, place.at(name(mpijob)), mpijobs)
            if run_status.state.active:
                handle = place.at(name(mpijob)).handle
                raise UserError(
                    f"the run {place.name} is {run_status.state.value} as MPIJob {name(mpijob)}"
                    f" in namespace {place.namespace}",
                    fix=f"follow it with `ortflow logs -f {handle}`, stop it with `ortflow cancel {handle}`",
                )
            if directory(mpijob) not in (volume, None):
                continue  # another run, on another volume
            cluster.delete("MPIJob", name(mpijob), place.namespace)
            sweep(cluster, place.namespace, name(mpijob))


def _place(
    request: KubernetesRequest, run_directory: Opened, cluster: Cluster, place: Place, documents: list[dict[str, Any]]
) -> str:
    """Create the objects and record the submission; returns its handle."""
    run = run_directory.run
    mpijob = create(cluster, documents)
    # From here on the directory belongs to this run, even if this fails.
    run_directory.handed_over = True
    before = read_place(run)
    place_fields: Mapping[str, Any] = {} if before is None else {"cursors": before.cursors, "sizes": before.sizes}
    if not is_real(run):
        write_place(run, replace(place.at(name(mpijob)), volume=directory(mpijob), **place_fields))
        keep(run, next(document for document in documents if document["kind"] == "ConfigMap"), request.payload.spec)
    run.record_attempt(
        event="submit", launcher="kubernetes", job=name(mpijob), new_budget=_new_budget(request, run_directory)
    )
    return place.at(name(mpijob)).handle


def _retry(clock: Clock, seconds: float, ask: Callable[[], list[Object]]) -> list[Object]:
    """Ask until there is an answer, for so many seconds. Raises OrtflowError after that."""
    end = clock.monotonic() + seconds
    while True:
        try:
            return ask()
        except Unreachable as error:
            if clock.monotonic() >= end:
                raise OrtflowError(f"{error}; nothing was submitted") from error
            clock.sleep(min(2.0, max(0.0, end - clock.monotonic())))


def _of_name(cluster: Cluster, name: str) -> list[Object]:
    """The MPIJobs of a run's name; raises UserError if the cluster has no operator, or they cannot be read."""
    try:
        return mpijobs(cluster, cluster.namespace, name)
    except Refused as error:
        require_operator(cluster)
        raise refusal(error) from error


def _new_budget(request: KubernetesRequest, directory: Opened) -> bool:
    records = directory.run.read_attempts()
    return request.submission.new_budget or (bool(records) and state(records, alive=False) is State.FAILED)
