"""The launcher for Slurm: a run as a batch job that restarts itself (`ortflow.launchers.slurm.run_supervisor`).

Submits, shows the status and cancels. Inside the job the supervisor process does the work; the two communicate only
through the run directory and Slurm, from any machine that sees both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.launchers.base import Submission
from ortflow.launchers.batch.history import by_hand, find_all, in_order, is_settled, placed
from ortflow.launchers.interpreter import check, examine, locate
from ortflow.launchers.logs import log_lines
from ortflow.launchers.records import Outcome, State, state
from ortflow.launchers.remote.arrival import shipped_code, submit_record
from ortflow.launchers.slurm.commands import GLANCE, NoAnswer, Refused, Slurm
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.status import gone, status
from ortflow.launchers.status import RunStatus
from ortflow.launchers.stop import write_request
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.disk_space import OutOfDisk
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.abilities import Trial
    from ortflow.launchers.findings import Finding
    from ortflow.launchers.run_directory_lock import Opened
    from ortflow.launchers.slurm.sweep import SweepRequest
    from ortflow.launchers.sweeps import Sweep
    from ortflow.manifests.slurm import Placement
    from ortflow.workflow.spec.run import RunSpec

KILL = 45.0
"""Seconds in which Slurm ends a cancelled job (KillWait, 30 by default)."""
LOOK = 5.0
"""Seconds between two polls of the queue while a log is followed."""


@dataclass(frozen=True)
class SlurmRequest:
    """The batch job of a run."""

    submission: Submission
    placement: Placement

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


class SlurmLauncher:
    """Runs in Slurm."""

    chains = True

    def __init__(self, slurm: Slurm | None = None) -> None:
        self._slurm = slurm or Slurm()

    def request(self, submission: Submission) -> SlurmRequest:
        """Return the request; queries srun, if there is one, for the way to start ranks."""
        from ortflow.launchers.slurm.probe import beside, choose_start, knows_expedite
        from ortflow.manifests.slurm import Placement

        spec = submission.spec
        python = _rank_python(spec)
        expedite = beside(lambda: knows_expedite(self._slurm))
        start = choose_start(spec, python, self._slurm)
        placement = Placement(
            run_dir=submission.run.root,
            run_supervisor_python=spec.backends.slurm.python or sys.executable,
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
        from ortflow.launchers.batch.submitting import place, settle
        from ortflow.launchers.run_directory_lock import opened
        from ortflow.launchers.slurm.shortage import in_detail
        from ortflow.launchers.stop import interruptible

        submission, run = request.submission, request.submission.run
        check_ranks(request)
        request.script("")  # report invalid values before anything is created
        if (job := settle(run, self._slurm)) is not None and (job.waits or not is_settled(run.read_attempts())):
            return self._adopted(request, job)
        before = placed(run.read_attempts(), "slurm")
        with interruptible(), opened(submission) as ours:
            if placed(run.read_attempts(), "slurm") not in (before, []):
                ours.handed_over = True
                raise UserError(f"{run.root} was just submitted by another process")
            if ours.finished:
                return f"slurm://{before[-1].job if before else ''}"
            new_budget = begin(request, ours)
            # From here on a job may exist that needs the directory, even if this fails.
            ours.handed_over = True
            try:
                submission_id, job_id = place(run, request.script, self._slurm, submission.retry)
            except (UserError, NoAnswer, OutOfDisk) as error:
                ours.handed_over = False
                if isinstance(error.__cause__, Refused):
                    raise in_detail(error, submission.spec, self._slurm) from error
                raise
            run.record_attempt(
                event="submit", launcher="slurm", job=job_id, submission=submission_id, new_budget=new_budget,
                **submit_record(),
            )  # fmt: skip
        return f"slurm://{job_id}"

    def status(self, run: RunDir) -> RunStatus:
        """From Slurm and the run directory; from the directory alone if Slurm does not answer."""
        if is_settled(run.read_attempts()):
            return status(run, self._left(), _nobody)
        try:
            return status(run, self._slurm.mine(), self._slurm.job, clock=self._slurm.clock)
        except OrtflowError as error:
            return status(run, None, _nobody, str(error))

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The same for many runs with one call of squeue, and one of sacct if jobs have left without a record."""
        open_ones = {run.root for run in runs if not is_settled(run.read_attempts())}
        try:
            jobs = self._slurm.mine() if open_ones else self._left()
            left = {run.root: job for run in runs if run.root in open_ones and (job := gone(run, jobs)) is not None}
            known = self._slurm.accounted([*left.values()])
            # Another user's jobs are not in our list: query each.
            clock = self._slurm.clock
            return [status(run, jobs, known.get if _is_ours(run) else self._slurm.job, clock=clock) for run in runs]
        except OrtflowError as error:
            return [status(run, None, _nobody, str(error)) for run in runs]

    def _left(self) -> Sequence[Job]:
        """The jobs, for runs whose directories show how they ended; empty if Slurm does not answer quickly."""
        try:
            return self._slurm.mine(GLANCE)
        except OrtflowError:
            return []

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log; followed across later attempts while the job is in the queue."""
        active = every(LOOK, lambda: self.status(run).state.active, self._slurm.clock) if follow else lambda: False
        return log_lines(run, attempt=attempt, rank=rank, active=active, clock=self._slurm.clock)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        """Remove a pending job from the queue; ask a running one to save and stop, or end it `now`."""
        from ortflow.launchers.batch.submitting import active

        try:
            job = active(run, self._slurm)
            again = [one.id for one in find_all(by_hand(run.root), self._slurm.mine()) if one.waits]
        except NoAnswer:
            # A running job sees the file even if the controller does not answer.
            if state(in_order(run.read_attempts()), alive=True) is not State.RUNNING:
                raise
            write_request(run.stop_request, "cancel", now=now)
            return True
        if again:
            # They would start the cancelled run.
            self._slurm.cancel(*again)
        if job is None:
            return bool(again)
        if is_settled(run.read_attempts()):
            if job.waits:  # requeued by a controller that has lost its start
                self._slurm.cancel(job.id)
            return bool(again) or job.waits
        if job.waits:
            self._slurm.cancel(job.id, pending=True)
            job = active(run, self._slurm)
            if job is not None and job.waits:  # held, in a state that --state=PENDING does not name
                self._slurm.cancel(job.id)
                job = None
            if job is None:
                record_cancelled(run)
                return True
        # The supervisor process must see the user's request: a job that only Slurm ends is requeued.
        write_request(run.stop_request, "cancel", now=now)
        if now or job.state in ("SUSPENDED", "STOPPED"):
            self._slurm.cancel(job.id)
            clock = self._slurm.clock
            end = clock.monotonic() + KILL
            while clock.monotonic() < end and active(run, self._slurm) is not None:
                clock.sleep(1.0)
            record_cancelled(run)
        return True

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
        from ortflow.launchers.slurm.sweep import request

        return request(sweep, submissions, at_once, self)

    def submit_sweep(self, request: SweepRequest) -> str:
        """Submit the job array; returns its handle."""
        from ortflow.launchers.slurm.sweep import submit

        return submit(request, self._slurm)

    def cancel_sweep(self, runs: Sequence[RunDir], *, now: bool) -> int:
        """Ask the runs of a job array to save and stop, with few commands; returns how many were active."""
        from ortflow.launchers.slurm.sweep_cancel import cancel

        return cancel(runs, self._slurm, now=now)

    def login_python(self, spec: RunSpec) -> str | None:
        """The supervisor's Python, or the ranks' if they run outside of containers."""
        slurm = spec.backends.slurm
        if slurm.python is not None:
            return slurm.python
        return spec.resources.python if slurm.container is None or slurm.container.kind == "none" else None

    def _adopted(self, request: SlurmRequest, job: Job) -> str:
        """The handle of a job whose submission got no answer. Raises UserError if it got one."""
        from ortflow.workflow.spec.file.dump import dump_run_file

        run = request.submission.run
        unanswered = next(reversed(placed(run.read_attempts(), "slurm")), None)
        same = unanswered is not None and run.run_file.read_bytes() == dump_run_file(request.submission.spec).encode()
        if unanswered is not None and unanswered.job is None and same and not request.submission.fresh:
            run.record_attempt(event="submit", launcher="slurm", job=job.id, submission=unanswered.submission)
            return f"slurm://{job.id}"
        raise UserError(
            f"{run.root} is job {job.id} in Slurm, {job.state.lower()}",
            fix=f"follow it with `ortflow logs -f {run.root}`, stop it with `ortflow cancel {run.root}`",
        )

    def _dependency(self, spec: RunSpec, after: Sequence[RunDir]) -> str | None:
        """The job's dependency: the run file's, and the success of the runs in `after`."""
        from ortflow.launchers.batch.chain import awaited

        own = spec.backends.slurm.dependency
        jobs = awaited(after, "slurm", self.statuses) if after else []
        if not jobs:
            return own if after else None
        if own is not None and "?" in own:
            raise UserError(
                f"is {own}, an alternative, and cannot be joined with --after",
                where="backends.slurm.dependency",
                fix="use one of the two",
            )
        return ",".join([*([own] if own else []), "afterok:" + ":".join(jobs)])


def check_ranks(request: SlurmRequest) -> None:
    """Raise UserError if the ranks' interpreter is visible here and cannot run them."""
    from ortflow.manifests.slurm.container import inside

    python = request.placement.rank_python
    if inside(request.submission.spec) is None and os.path.exists(python):
        check(examine(python))


def begin(request: SlurmRequest, ours: Opened) -> bool:
    """Prepare the submission: make missing files, remove an old stop request. Returns whether budgets are new."""
    from ortflow.launchers.prepare import prepare

    submission = request.submission
    prepare(submission.spec, submission.folder, request.placement.rank_python)
    ours.run.stop_request.unlink(missing_ok=True)
    return submission.new_budget or state(in_order(ours.run.read_attempts()), alive=False) is State.FAILED


def record_cancelled(run: RunDir) -> None:
    """Record that the user cancelled the run, unless it has ended by itself."""
    if not is_settled(run.read_attempts()):
        why = "requested by ortflow cancel"
        run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked="cancel", why=why)


def _nobody(job_id: str) -> None:
    """A lookup that finds no job, without a query of the accounting."""


def _is_ours(run: RunDir) -> bool:
    """Whether the run's jobs belong to this user."""
    return run.root.stat().st_uid == os.geteuid()


def _rank_python(spec: RunSpec) -> str:
    """The ranks' interpreter; one that only the nodes have is not checked."""
    python = spec.resources.python
    if python is not None and os.path.isabs(python) and not os.path.exists(python):
        return python
    return locate(python)


def every(seconds: float, ask: Callable[[], bool], clock: Clock = SYSTEM_CLOCK) -> Callable[[], bool]:
    """Cache the answer of `ask` for so many seconds."""
    answer, due = True, 0.0

    def asked() -> bool:
        nonlocal answer, due
        if clock.monotonic() >= due:
            answer, due = ask(), clock.monotonic() + seconds
        return answer

    return asked
