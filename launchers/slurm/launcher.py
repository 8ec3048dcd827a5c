"""The launcher for Slurm: a run as a batch job that restarts itself (`ortflow.launchers.slurm.run_supervisor`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.launchers.base import Submission
from ortflow.launchers.batch.history import by_hand
from ortflow.launchers.batch.launcher import BatchLauncher
from ortflow.launchers.interpreter import check, examine, locate
from ortflow.launchers.named_programs import trusts
from ortflow.launchers.remote.arrival import shipped_code
from ortflow.launchers.slurm.commands import Refused, Slurm
from ortflow.launchers.slurm.jobs import Job
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.capabilities import Trial
    from ortflow.launchers.findings import Finding
    from ortflow.launchers.slurm.sweep import SweepRequest
    from ortflow.launchers.sweeps import Sweep
    from ortflow.manifests.slurm import Placement
    from ortflow.workflow.spec.run import RunSpec


@dataclass(frozen=True)
class SlurmRequest:
    """The batch job of a run."""

    submission: Submission
    placement: Placement

    @property
    def rank_python(self) -> str:
        """The ranks' interpreter."""
        return self.placement.rank_python

    def check(self) -> None:
        """Raise UserError if the ranks' interpreter is visible here and cannot run them."""
        from ortflow.manifests.slurm.container import inside

        if inside(self.submission.spec) is None and os.path.exists(self.rank_python):
            check(examine(self.rank_python), program=self.submission.spec.program is not None)

    def script(self, submission_id: str) -> str:
        """The batch script, with the id by which the job is found."""
        from ortflow.manifests.slurm import script

        return script(self.submission.spec, replace(self.placement, submission=submission_id))

    @property
    def by_hand(self) -> Placement:
        """For a self-contained script: the same for the same run, with the run file in it."""
        from ortflow.workflow.spec.file.dump import dump_run_file

        submission = self.submission
        folder = submission.folder if submission.spec.prepare else None
        return replace(self.placement, run_file=dump_run_file(submission.spec), prepare_in=folder)

    def __str__(self) -> str:
        from ortflow.manifests.slurm import script

        return script(self.submission.spec, self.by_hand).rstrip("\n")


class SlurmLauncher(BatchLauncher[Job]):
    """Runs in Slurm."""

    chains = True

    def __init__(self, slurm: Slurm | None = None) -> None:
        self._slurm = slurm or Slurm()
        super().__init__(self._slurm)

    def request(self, submission: Submission) -> SlurmRequest:
        """Return the request; queries srun, if there is one, for the way to start ranks."""
        from ortflow.launchers.slurm.probe import beside, choose_start, supports_expedite
        from ortflow.manifests.slurm import Placement

        spec = submission.spec
        python = _rank_python(spec)
        expedite = beside(lambda: supports_expedite(self._slurm))
        start = choose_start(spec, python, self._slurm, trusts=trusts(submission))
        placement = Placement(
            run_dir=submission.run.root,
            run_supervisor_python=_run_supervisor_python(spec),
            rank_python=python,
            start=start.how,
            submission=str(by_hand(submission.run.root).submission),
            mpirun=start.mpirun,
            kind=start.kind,
            expedite=expedite(),
            dependency=self._dependency(spec, submission.after),
            code=Path(code) if (code := shipped_code()) else None,
        )
        return SlurmRequest(submission, placement)

    def submit(self, request: SlurmRequest) -> str:
        """Submit the job. Raises UserError if Slurm or the run directory refuses it."""
        from ortflow.launchers.slurm.missing_resources import explained

        try:
            return super().submit(request)
        except UserError as error:
            if isinstance(error.__cause__, Refused):
                raise explained(error, request.submission.spec, self._slurm) from error
            raise

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        """The findings of `doctor` on the cluster."""
        from ortflow.launchers.slurm.doctor import examine_cluster

        return examine_cluster(submission, None, of_user=file or overrides)

    def examine_with_job(
        self, submission: Submission, trial: Trial, *, file: bool, overrides: bool
    ) -> Iterator[Finding]:
        """The same, and the findings of a job on the nodes."""
        from ortflow.launchers.slurm.doctor import examine_cluster

        return examine_cluster(submission, trial, of_user=file or overrides)

    def check_sweep(self, count: int) -> None:
        """Raise UserError if a job array must not have so many tasks."""
        from ortflow.launchers.slurm.sweep import check_length

        check_length(count, self._slurm)

    def request_sweep(self, sweep: Sweep, submissions: Sequence[Submission], at_once: int | None) -> SweepRequest:
        """The job array of a sweep; raises UserError for values that all tasks of an array share."""
        from ortflow.launchers.slurm.sweep import SweepRequest

        first = self.request(submissions[0])
        requests = (
            SlurmRequest(submission, replace(first.placement, run_dir=submission.run.root))
            for submission in submissions
        )
        return SweepRequest(sweep, tuple(requests), at_once)

    def submit_sweep(self, request: SweepRequest) -> str:
        """Submit the job array; returns its handle."""
        from ortflow.launchers.batch.sweeps import submit

        return submit(request, self._slurm)

    def cancel_sweep(self, runs: Sequence[RunDir], *, now: bool) -> int:
        """Ask the runs of a job array to save and stop, with few commands; returns how many were active."""
        from ortflow.launchers.batch.sweeps import cancel

        return cancel(runs, self._slurm, now=now)

    def login_python(self, spec: RunSpec) -> str | None:
        """The supervisor's Python, or the ranks' if they run outside of containers."""
        slurm = spec.backends.slurm
        if slurm.python is not None:
            return slurm.python
        return spec.resources.python if slurm.container is None or slurm.container.kind == "none" else None

    def _dependency(self, spec: RunSpec, after: Sequence[RunDir]) -> str | None:
        """The job's dependency: the run file's, and the success of the runs in `after`."""
        from ortflow.launchers.batch.chain import awaited

        dependency = spec.backends.slurm.dependency
        jobs = awaited(after, "slurm", self.statuses) if after else []
        if not jobs:
            return dependency if after else None
        if dependency is not None and "?" in dependency:
            raise UserError(
                # Slurm joins dependencies either all by `,` (and) or all by `?` (or).
                f"is {dependency}, an alternative, and cannot be joined with --after",
                where="backends.slurm.dependency",
                fix="use one of the two",
            )
        return ",".join([*([dependency] if dependency else []), "afterok:" + ":".join(jobs)])


def _run_supervisor_python(spec: RunSpec) -> str:
    """The supervisor's interpreter; a relative path is absolute, because the script leaves the folder."""
    python = spec.backends.slurm.python or sys.executable
    return os.path.abspath(python) if os.sep in python else python


def _rank_python(spec: RunSpec) -> str:
    """The ranks' interpreter; one that only the nodes have is not checked."""
    python = spec.resources.python
    if python is not None and os.path.isabs(python) and not os.path.exists(python):
        return python
    return locate(python)
