"""The launcher for Kubernetes: a run as an MPIJob whose launcher pod keeps it going (`keeper`).

Submits, tells, shows logs and cancels, from anywhere that reaches the API server. The run's files lie on a volume that
only its pods see; what is known here is the record directory, which `mirror` fills from the launcher pods' logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.carried import Cargo, cargo_of
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.mirror import WORDS
from ortflow.launchers.kubernetes.place import Place, is_real, read_place, write_place
from ortflow.launchers.logs import log_lines
from ortflow.launchers.records import State, state
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.findings import Finding
    from ortflow.launchers.opening import Opened
    from ortflow.workflow.spec.run import RunSpec

_CLAIM_OUT = """\
The claim {claim} is not in this file: `kubectl delete -f` would delete it and every checkpoint on it.
If the namespace lacks it, make it once: ortflow render -b kubernetes --with-claim RUN_FILE | kubectl apply -f -
To delete it and the checkpoints: kubectl delete pvc {claim}"""
_CLAIM_IN = """\
The claim {claim} is in this file: `kubectl delete -f` deletes it and every checkpoint on it."""
FOLLOWING = 1.0
"""Seconds between two looks while a log is followed."""


@dataclass(frozen=True)
class KubernetesRequest:
    """The documents of a run."""

    submission: Submission
    cargo: Cargo
    with_claim: bool = False
    """Print the claim of `volume.create`, too."""

    def documents(self, suffix: str | None, namespace: str | None, *, new_budget: bool) -> list[dict[str, Any]]:
        """As they are sent; `suffix` makes the job's name a new one."""
        from ortflow.manifests.kubernetes import Placement, documents

        placement = Placement(
            suffix=suffix, new_budget=new_budget, fresh=self.submission.fresh, namespace=namespace,
            contents=self.cargo.contents,
        )  # fmt: skip
        return documents(self.cargo.source, self.cargo.spec, placement)

    def __str__(self) -> str:
        """The documents, but for the claim unless it is wanted: whoever deletes the file's things keeps the data."""
        from ortflow.manifests.kubernetes import dump, without_claim

        found = self.documents(None, None, new_budget=self.submission.new_budget)
        kept, claim = without_claim(found)
        text = dump(found if self.with_claim else kept).rstrip("\n")
        if claim is None:
            return text
        words = _CLAIM_IN if self.with_claim else _CLAIM_OUT
        return "\n".join([*(f"# {line}" for line in words.format(claim=claim).splitlines()), text])


class KubernetesLauncher:
    """Runs on Kubernetes."""

    elsewhere = True
    """Its runs' files lie where only their pods see them."""
    scope = " or in the namespace of this kubeconfig; -A looks into all"

    def __init__(self, links: Links | None = None) -> None:
        self._links = links or Links()

    def request(self, submission: Submission) -> KubernetesRequest:
        """The request: reads the files that travel along, asks nobody."""
        if submission.after:
            raise UserError("runs on Kubernetes cannot wait for others", fix="leave --after out")
        return KubernetesRequest(submission, cargo_of(submission))

    def submit(self, request: KubernetesRequest) -> str:
        """Make the run's objects; raises UserError where the cluster or the record directory does not take it."""
        from ortflow.launchers.kubernetes.submitting import new_suffix
        from ortflow.launchers.opening import opened
        from ortflow.launchers.stop import interruptible

        run, backend = request.submission.run, request.cargo.spec.backends.kubernetes
        # What has no place in a document is told before anybody is asked.
        mine = request.documents(None, backend.namespace or "default", new_budget=False)
        before = read_place(run)
        # A run that is resumed stays where it is, whatever kubectl's namespace has become.
        pinned = before.namespace if before is not None and request.submission.source is None else None
        cluster = self._links.connect(
            backend.context or (before.context if before else None), backend.namespace or pinned
        )
        there = self._patiently(request.submission.retry, lambda: _of_name(cluster, request.cargo.spec.name))
        place = Place(cluster.namespace, request.cargo.spec.name, context=cluster.context)
        if before is not None and self._elsewhere(before, cluster):
            self._keep_in_sight(run, before, cluster, fresh=request.submission.fresh)
        if request.submission.source is None and before is not None and self._let_go(request, cluster, before):
            return before.handle
        self._settle(run, cluster, place, mine, there)
        # Where it writes is the pods' business: the record directory is no part of the run file.
        spec = request.cargo.spec.model_copy(update={"run_dir": None})
        with interruptible(), opened(replace(request.submission, spec=spec)) as ours:
            if ours.finished:
                return (read_place(run) or place).handle
            documents = request.documents(new_suffix(), cluster.namespace, new_budget=_new_budget(request, ours))
            return self._place(request, ours, cluster, place, documents)

    def status(self, run: RunDir) -> RunStatus:
        """As the records and the cluster tell it; as the records alone do where the API server does not answer."""
        return self._links.status(run)

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The same of many runs, each namespace being asked once."""
        return self._links.statuses(runs)

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log; followed, across pods that are replaced, as long as the run is active."""
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
        """Delete the MPIJob, so that ranks save and leave, and read on until its launcher pod is gone."""
        from ortflow.launchers.kubernetes.cancelling import cancel
        from ortflow.launchers.kubernetes.refusals import in_a_sentence

        with in_a_sentence():
            return cancel(run, self._links, now=now)

    def listed(self, runs: Sequence[RunDir], *, everywhere: bool) -> list[RunStatus]:
        """Those of the runs that are on Kubernetes, and the cluster's other runs, of our namespace or `everywhere`."""
        return self._links.listed(runs, everywhere=everywhere)

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        """What `doctor` finds in the cluster."""
        from ortflow.launchers.kubernetes.doctor import examine_kubernetes

        return examine_kubernetes(submission, of_user=file)

    def validate(self, spec: RunSpec, source: Mapping[str, Any], *, chosen: bool) -> None:
        """Raise Faults where the documents are wrong, as overlays leave them; not of a run that has no image yet."""
        from ortflow.manifests.kubernetes import Placement, documents
        from ortflow.workflow.spec.checks.kubernetes import require

        if chosen:
            require(spec)
        elif spec.backends.kubernetes.image is None:
            return
        # What the carried files say does not matter here, nor where the run goes.
        contents = dict.fromkeys(spec.backends.kubernetes.files, "")
        documents(source, spec, Placement(namespace="default", contents=contents))

    def files_at(self, spec: RunSpec) -> str:
        """The folder on the volume."""
        backend = spec.backends.kubernetes
        return f"pods see them from {backend.folder or f'{backend.volume.mount}/files/{spec.name}'} on the volume"

    def adopt(self, handle: str, runs: Path) -> RunDir:
        """The record directory of kubernetes://NAMESPACE/MPIJOB, made if there is none yet; raises UserError."""
        from ortflow.launchers.kubernetes.adopting import adopt

        return adopt(handle, runs)

    def handles(self, name: str) -> tuple[list[str], list[str]]:
        """Handles of the MPIJobs of a run's name that are not over: in our namespace, and in others."""
        from ortflow.launchers.kubernetes.adopting import handles

        return handles(name) if re.fullmatch("[a-z0-9-]+", name) else ([], [])

    def supervise(self, run: RunDir, say: Callable[[str], None]) -> int:
        """Repair what the operator cannot, until the run ends; its exit code."""
        from ortflow.launchers.kubernetes.supervise import in_terminal

        return in_terminal(run, self._links, say)

    def with_claim(self, request: KubernetesRequest) -> KubernetesRequest:
        """The request with the claim of `volume.create`."""
        return replace(request, with_claim=True)

    def _let_go(self, request: KubernetesRequest, cluster: Cluster, place: Place) -> bool:
        """Have a suspended MPIJob start; False where there is none, or a queue has to. Raises UserError."""
        from ortflow.launchers.kubernetes.look import look
        from ortflow.launchers.kubernetes.refusals import in_a_sentence
        from ortflow.launchers.kubernetes.status import suspended

        with in_a_sentence():
            view = look(cluster, place, closely=False)
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

    def _keep_in_sight(self, run: RunDir, before: Place, cluster: Cluster, *, fresh: bool) -> None:
        """Raise UserError where a record would be lost by which a run elsewhere is followed."""
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
        """Whether a run's record tells of another namespace or another cluster than is meant now."""
        if before.namespace != cluster.namespace:
            return True
        if before.context in (None, cluster.context):
            return False
        try:
            return self._links.connect(before.context, before.namespace).server != cluster.server
        except UserError:  # there is no such context any more
            return True

    def _settle(
        self, run: RunDir, cluster: Cluster, place: Place, mine: Sequence[Object], found: Sequence[Object]
    ) -> None:
        """Raise UserError where the run is at work in an MPIJob that was found; take away one that only seems to be."""
        from ortflow.launchers.kubernetes.objects import directory, name, over
        from ortflow.launchers.kubernetes.refusals import in_a_sentence
        from ortflow.launchers.kubernetes.submitting import sweep

        volume = next(directory(one) for one in mine if one["kind"] == "MPIJob")
        with in_a_sentence():
            for mpijob in found:
                if over(mpijob):
                    continue
                how = self._links.closely(run, cluster, place.at(name(mpijob)), found)
                if how.state.active:
                    handle = place.at(name(mpijob)).handle
                    raise UserError(
                        f"the run {place.name} is {how.state.value} as MPIJob {name(mpijob)}"
                        f" in namespace {place.namespace}",
                        fix=f"follow it with `ortflow logs -f {handle}`, stop it with `ortflow cancel {handle}`",
                    )
                if directory(mpijob) not in (volume, None):
                    continue  # another's, on another volume
                cluster.delete("MPIJob", name(mpijob), place.namespace)
                sweep(cluster, place.namespace, name(mpijob))

    def _place(
        self, request: KubernetesRequest, ours: Opened, cluster: Cluster, place: Place, documents: list[dict[str, Any]]
    ) -> str:
        from ortflow.launchers.kubernetes.carried import keep
        from ortflow.launchers.kubernetes.objects import directory, name
        from ortflow.launchers.kubernetes.submitting import create

        run = ours.run
        mpijob = create(cluster, documents)
        # From here on there is a run that the directory is known by, however this ends.
        ours.handed_over = True
        before = read_place(run)
        known: Mapping[str, Any] = {} if before is None else {"cursors": before.cursors, "sizes": before.sizes}
        if not is_real(run):
            write_place(run, replace(place.at(name(mpijob)), volume=directory(mpijob), **known))
            keep(run, next(one for one in documents if one["kind"] == "ConfigMap"), request.cargo.spec)
        run.record_attempt(
            event="submit", launcher="kubernetes", job=name(mpijob), new_budget=_new_budget(request, ours)
        )
        return place.at(name(mpijob)).handle

    def _patiently(self, seconds: float, ask: Callable[[], list[Object]]) -> list[Object]:
        end = self._links.clock.monotonic() + seconds
        while True:
            try:
                return ask()
            except Unreachable as error:
                if self._links.clock.monotonic() >= end:
                    raise OrtflowError(f"{error}; nothing was submitted") from error
                self._links.clock.sleep(min(2.0, max(0.0, end - self._links.clock.monotonic())))


def _of_name(cluster: Cluster, name: str) -> list[Object]:
    """The MPIJobs of a run's name; raises UserError where the cluster has no operator, or does not show them."""
    from ortflow.launchers.kubernetes.look import mpijobs
    from ortflow.launchers.kubernetes.refusals import refusal
    from ortflow.launchers.kubernetes.submitting import require_operator

    try:
        return mpijobs(cluster, cluster.namespace, name)
    except Refused as error:
        require_operator(cluster)
        raise refusal(error) from error


def _no_log(run: RunDir, how: RunStatus) -> UserError:
    """Why no rank of a run has said anything."""
    words = run.root / WORDS
    return UserError(
        f"no rank of {how.name} has started: it is {how.state.value}"
        + (f": {why}" if (why := how.waits or how.cause) else ""),
        fix=f"what its launcher pod said is in {words}" if words.exists() else None,
    )


def _new_budget(request: KubernetesRequest, ours: Opened) -> bool:
    records = ours.run.read_attempts()
    return request.submission.new_budget or (bool(records) and state(records, alive=False) is State.FAILED)
