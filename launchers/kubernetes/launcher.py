"""The launcher for Kubernetes: a run as an MPIJob whose launcher pod supervises it (`run_supervisor`).

Submits, shows status and logs, and cancels, from any machine that reaches the API server. The run's files are on a
volume that only its pods see; the local copy is the record directory, which `log_replicator` fills from the launcher
pods' logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.log_replicator import POD_OUTPUT
from ortflow.launchers.kubernetes.payload import Payload, payload_of
from ortflow.launchers.kubernetes.place import Place, is_real, read_place, write_place
from ortflow.launchers.logs import log_lines
from ortflow.launchers.records import State, state
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.findings import Finding
    from ortflow.launchers.run_directory_lock import Opened
    from ortflow.workflow.spec.run import RunSpec

_CLAIM_OUT = """\
The claim {claim} is not in this file: `kubectl delete -f` would delete it and every checkpoint on it.
If the namespace lacks it, make it once: ortflow render -b kubernetes --with-claim RUN_FILE | kubectl apply -f -
To delete it and the checkpoints: kubectl delete pvc {claim}"""
_CLAIM_IN = """\
The claim {claim} is in this file: `kubectl delete -f` deletes it and every checkpoint on it."""
FOLLOWING = 1.0
"""Seconds between two polls while a log is followed."""


@dataclass(frozen=True)
class KubernetesRequest:
    """The documents of a run."""

    submission: Submission
    payload: Payload
    with_claim: bool = False
    """Print the claim of `volume.create`, too."""

    def documents(self, suffix: str | None, namespace: str | None, *, new_budget: bool) -> list[dict[str, Any]]:
        """The documents as sent; `suffix` makes the job's name unique."""
        from ortflow.manifests.kubernetes import Placement, documents

        placement = Placement(
            suffix=suffix, new_budget=new_budget, fresh=self.submission.fresh, namespace=namespace,
            contents=self.payload.contents,
        )  # fmt: skip
        return documents(self.payload.source, self.payload.spec, placement)

    def __str__(self) -> str:
        """The documents, without the claim unless requested: deleting the file's objects then keeps the data."""
        from ortflow.manifests.kubernetes import dump, without_claim

        found = self.documents(None, None, new_budget=self.submission.new_budget)
        kept, claim = without_claim(found)
        text = dump(found if self.with_claim else kept).rstrip("\n")
        if claim is None:
            return text
        comment = _CLAIM_IN if self.with_claim else _CLAIM_OUT
        return "\n".join([*(f"# {line}" for line in comment.format(claim=claim).splitlines()), text])


class KubernetesLauncher:
    """Runs on Kubernetes."""

    elsewhere = True
    """Only the pods of its runs see their files."""
    scope = " or in the namespace of this kubeconfig; -A searches all"

    def __init__(self, links: Links | None = None) -> None:
        self._links = links or Links()

    def request(self, submission: Submission) -> KubernetesRequest:
        """Return the request: reads the files to carry, sends nothing."""
        if submission.after:
            raise UserError("runs on Kubernetes cannot wait for others", fix="leave --after out")
        return KubernetesRequest(submission, payload_of(submission))

    def submit(self, request: KubernetesRequest) -> str:
        """Create the run's objects. Raises UserError if the cluster or the record directory refuses it."""
        from ortflow.launchers.kubernetes.submitting import new_suffix
        from ortflow.launchers.run_directory_lock import opened
        from ortflow.launchers.stop import interruptible

        run, backend = request.submission.run, request.payload.spec.backends.kubernetes
        # Report invalid values before the first request.
        mine = request.documents(None, backend.namespace or "default", new_budget=False)
        before = read_place(run)
        # A resumed run stays in its namespace, even if kubectl's has changed.
        pinned = before.namespace if before is not None and request.submission.source is None else None
        cluster = self._links.connect(
            backend.context or (before.context if before else None), backend.namespace or pinned
        )
        there = self._retry(request.submission.retry, lambda: _of_name(cluster, request.payload.spec.name))
        place = Place(cluster.namespace, request.payload.spec.name, context=cluster.context)
        if before is not None and self._elsewhere(before, cluster):
            self._refuse_losing_record(run, before, cluster, fresh=request.submission.fresh)
        if request.submission.source is None and before is not None and self._unsuspend(request, cluster, before):
            return before.handle
        self._settle(run, cluster, place, mine, there)
        # The pods have their own run directory: the record directory must not be in the run file.
        spec = request.payload.spec.model_copy(update={"run_dir": None})
        with interruptible(), opened(replace(request.submission, spec=spec)) as ours:
            if ours.finished:
                return (read_place(run) or place).handle
            documents = request.documents(new_suffix(), cluster.namespace, new_budget=_new_budget(request, ours))
            return self._place(request, ours, cluster, place, documents)

    def status(self, run: RunDir) -> RunStatus:
        """From the records and the cluster; from the records alone if the API server does not answer."""
        return self._links.status(run)

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The same for many runs, with one query per namespace."""
        return self._links.statuses(runs)

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log; followed across replaced pods while the run is active."""
        how, due = self.status(run), self._links.clock.monotonic() + FOLLOWING

        def active() -> bool:
            nonlocal how, due
            if self._links.clock.monotonic() >= due:
                how, due = self.status(run), self._links.clock.monotonic() + FOLLOWING
            return how.state.active

        if how.attempts or (follow and how.state.active):
            clock = self._links.clock
            whether = active if follow else lambda: False
            yield from log_lines(run, attempt=attempt, rank=rank, active=whether, clock=clock)
        if not how.attempts and not (follow and how.state.active):
            raise _no_log(run, how)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        """Delete the MPIJob, so that ranks save and stop, and read its log until the launcher pod is gone."""
        from ortflow.launchers.kubernetes.cancelling import cancel
        from ortflow.launchers.kubernetes.refusals import in_a_sentence

        with in_a_sentence():
            return cancel(run, self._links, now=now)

    def listed(self, runs: Sequence[RunDir], *, everywhere: bool) -> list[RunStatus]:
        """The status of the runs on Kubernetes, and of the cluster's other runs, in our namespace or `everywhere`."""
        return self._links.listed(runs, everywhere=everywhere)

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        """The findings of `doctor` in the cluster."""
        from ortflow.launchers.kubernetes.doctor import examine_kubernetes

        return examine_kubernetes(submission, of_user=file)

    def validate(self, spec: RunSpec, source: Mapping[str, Any], *, chosen: bool) -> str | None:
        """Raise Faults if the documents with their overlays are wrong; a missing image is not a fault yet."""
        from ortflow.manifests.kubernetes import Placement, documents, schema
        from ortflow.workflow.spec.checks.kubernetes import require

        if chosen:
            require(spec)
        elif spec.backends.kubernetes.image is None:
            return None
        # The content of carried files and the namespace do not matter here.
        contents = dict.fromkeys(spec.backends.kubernetes.files, "")
        documents(source, spec, Placement(namespace="default", contents=contents))
        if not schema.used(spec.backends.kubernetes) or schema.available():
            return None
        return "fields of Kubernetes, because there is no package kubernetes: `pip install 'ortflow[kubernetes]'`"

    def files_at(self, spec: RunSpec) -> str:
        """The folder on the volume."""
        backend = spec.backends.kubernetes
        return f"pods see them from {backend.folder or f'{backend.volume.mount}/files/{spec.name}'} on the volume"

    def adopt(self, handle: str, runs: Path) -> RunDir:
        """The record directory of kubernetes://NAMESPACE/MPIJOB, created if missing. Raises UserError."""
        from ortflow.launchers.kubernetes.adopting import adopt

        return adopt(handle, runs)

    def handles(self, name: str) -> tuple[list[str], list[str]]:
        """Handles of the unfinished MPIJobs with a run's name: in our namespace, and in others."""
        from ortflow.launchers.kubernetes.adopting import handles

        return handles(name) if re.fullmatch("[a-z0-9-]+", name) else ([], [])

    def supervise(self, run: RunDir, report: Callable[[str], None]) -> int:
        """Repair what the operator cannot, until the run ends; returns its exit code."""
        from ortflow.launchers.kubernetes.supervise import in_terminal

        return in_terminal(run, self._links, report)

    def with_claim(self, request: KubernetesRequest) -> KubernetesRequest:
        """The request with the claim of `volume.create`."""
        return replace(request, with_claim=True)

    def _unsuspend(self, request: KubernetesRequest, cluster: Cluster, place: Place) -> bool:
        """Start a suspended MPIJob; False if there is none, or if a queue starts it. Raises UserError."""
        from ortflow.launchers.kubernetes.refusals import in_a_sentence
        from ortflow.launchers.kubernetes.snapshot import take_snapshot
        from ortflow.launchers.kubernetes.status import suspended

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

    def _refuse_losing_record(self, run: RunDir, before: Place, cluster: Cluster, *, fresh: bool) -> None:
        """Raise UserError if the record of a run elsewhere would be lost."""
        active = self.status(run).state.active
        if fresh and not active:
            return
        raise UserError(
            f"{run.root} is the record of the run {before.name} in namespace {before.namespace}"
            + (f" of context {before.context}" if before.context != cluster.context else ""),
            where="backends.kubernetes.namespace",
            fix="give this run another name or another --runs-dir"
            + ("" if active else f", or --fresh, which keeps that record as {run.root.name}.1"),
        )

    def _elsewhere(self, before: Place, cluster: Cluster) -> bool:
        """Whether a run's record names another namespace or cluster than the selected one."""
        if before.namespace != cluster.namespace:
            return True
        if before.context in (None, cluster.context):
            return False
        try:
            return self._links.connect(before.context, before.namespace).server != cluster.server
        except UserError:  # the context no longer exists
            return True

    def _settle(
        self, run: RunDir, cluster: Cluster, place: Place, mine: Sequence[Object], found: Sequence[Object]
    ) -> None:
        """Raise UserError if the run is active in an existing MPIJob; delete one that only seems to be."""
        from ortflow.launchers.kubernetes.objects import directory, name, over
        from ortflow.launchers.kubernetes.refusals import in_a_sentence
        from ortflow.launchers.kubernetes.submitting import sweep

        volume = next(directory(one) for one in mine if one["kind"] == "MPIJob")
        with in_a_sentence():
            for mpijob in found:
                if over(mpijob):
                    continue
                how = self._links.status_of_active(run, cluster, place.at(name(mpijob)), found)
                if how.state.active:
                    handle = place.at(name(mpijob)).handle
                    raise UserError(
                        f"the run {place.name} is {how.state.value} as MPIJob {name(mpijob)}"
                        f" in namespace {place.namespace}",
                        fix=f"follow it with `ortflow logs -f {handle}`, stop it with `ortflow cancel {handle}`",
                    )
                if directory(mpijob) not in (volume, None):
                    continue  # another run, on another volume
                cluster.delete("MPIJob", name(mpijob), place.namespace)
                sweep(cluster, place.namespace, name(mpijob))

    def _place(
        self, request: KubernetesRequest, ours: Opened, cluster: Cluster, place: Place, documents: list[dict[str, Any]]
    ) -> str:
        from ortflow.launchers.kubernetes.objects import directory, name
        from ortflow.launchers.kubernetes.payload import keep
        from ortflow.launchers.kubernetes.submitting import create

        run = ours.run
        mpijob = create(cluster, documents)
        # From here on the directory belongs to this run, even if this fails.
        ours.handed_over = True
        before = read_place(run)
        known: Mapping[str, Any] = {} if before is None else {"cursors": before.cursors, "sizes": before.sizes}
        if not is_real(run):
            write_place(run, replace(place.at(name(mpijob)), volume=directory(mpijob), **known))
            keep(run, next(one for one in documents if one["kind"] == "ConfigMap"), request.payload.spec)
        run.record_attempt(
            event="submit", launcher="kubernetes", job=name(mpijob), new_budget=_new_budget(request, ours)
        )
        return place.at(name(mpijob)).handle

    def _retry(self, seconds: float, ask: Callable[[], list[Object]]) -> list[Object]:
        end = self._links.clock.monotonic() + seconds
        while True:
            try:
                return ask()
            except Unreachable as error:
                if self._links.clock.monotonic() >= end:
                    raise OrtflowError(f"{error}; nothing was submitted") from error
                self._links.clock.sleep(min(2.0, max(0.0, end - self._links.clock.monotonic())))


def _of_name(cluster: Cluster, name: str) -> list[Object]:
    """The MPIJobs of a run's name; raises UserError if the cluster has no operator, or they cannot be read."""
    from ortflow.launchers.kubernetes.refusals import refusal
    from ortflow.launchers.kubernetes.snapshot import mpijobs
    from ortflow.launchers.kubernetes.submitting import require_operator

    try:
        return mpijobs(cluster, cluster.namespace, name)
    except Refused as error:
        require_operator(cluster)
        raise refusal(error) from error


def _no_log(run: RunDir, how: RunStatus) -> UserError:
    """Why no rank of a run has output."""
    output = run.root / POD_OUTPUT
    return UserError(
        f"no rank of {how.name} has started: it is {how.state.value}"
        + (f": {why}" if (why := how.waits or how.cause) else ""),
        fix=f"the output of its launcher pod is in {output}" if output.exists() else None,
    )


def _new_budget(request: KubernetesRequest, ours: Opened) -> bool:
    records = ours.run.read_attempts()
    return request.submission.new_budget or (bool(records) and state(records, alive=False) is State.FAILED)
