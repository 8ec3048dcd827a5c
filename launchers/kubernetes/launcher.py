"""The launcher for Kubernetes: a run as an MPIJob whose launcher pod supervises it (`run_supervisor`).

Submits, shows status and logs, and cancels, from any machine that reaches the API server. The run's files are on a
volume that only its pods see; the local copy is the record directory, which `log_replicator` fills from the launcher
pods' logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.links import Links
from ortflow.launchers.kubernetes.log_replicator import POD_OUTPUT
from ortflow.launchers.kubernetes.payload import payload_of
from ortflow.launchers.kubernetes.request import KubernetesRequest
from ortflow.launchers.logs import log_lines
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.findings import Finding
    from ortflow.workflow.spec.run import RunSpec


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
        from ortflow.launchers.kubernetes.submission import submit

        return submit(request, self._links)

    def status(self, run: RunDir) -> RunStatus:
        """From the records and the cluster; from the records alone if the API server does not answer."""
        return self._links.status(run)

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The same for many runs, with one query per namespace."""
        return self._links.statuses(runs)

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log; followed across replaced pods while the run is active."""
        run_status, clock = self.status(run), self._links.clock
        if follow and run_status.state.active:
            from ortflow.launchers.kubernetes.log_follower import LogFollower

            with LogFollower(run, self._links, run_status) as follower:
                yield from log_lines(run, attempt=attempt, rank=rank, active=follower.active, clock=clock)
                run_status = follower.how
        elif run_status.attempts:
            yield from log_lines(run, attempt=attempt, rank=rank, active=lambda: False, clock=clock)
        if not run_status.attempts:
            raise _no_log(run, run_status)

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


def _no_log(run: RunDir, run_status: RunStatus) -> UserError:
    """Why no rank of a run has output."""
    output = run.root / POD_OUTPUT
    if run_status.state is State.FINISHED:
        return UserError(f"there is no log of {run_status.name} here: it has {run_status.cause}")
    return UserError(
        f"no rank of {run_status.name} has started: it is {run_status.state.value}"
        + (f": {reason}" if (reason := run_status.waits or run_status.cause) else ""),
        fix=f"the output of its launcher pod is in {output}" if output.exists() else None,
    )
