"""A launcher for a batch scheduler: submits, shows the status and logs, and cancels.

Inside the job the run supervisor does the work (`ortflow.launchers.batch.job_supervisor`); the two communicate only
through the run directory and the scheduler, from any machine that sees both. A scheduler's launcher derives from
`BatchLauncher` and adds `request`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol

from ortflow.launchers.base import Submission
from ortflow.launchers.batch.history import by_hand, find_all, in_order, is_settled
from ortflow.launchers.batch.scheduler import JobT, NoAnswer, NotOwner, Scheduler
from ortflow.launchers.batch.status import gone, status
from ortflow.launchers.logs import log_lines
from ortflow.launchers.placed import placed
from ortflow.launchers.records import Outcome, State, state
from ortflow.launchers.remote.arrival import submit_record
from ortflow.launchers.status import RunStatus
from ortflow.launchers.stop import write_request
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.disk_space import OutOfDisk

if TYPE_CHECKING:
    from ortflow.launchers.run_directory_lock import Opened

KILL = 45.0
"""Seconds in which the scheduler ends a cancelled job (Slurm: KillWait, 30 by default)."""
POLL = 5.0
"""Seconds between two polls of the queue while a log is followed."""
GLANCE = 1.5
"""Seconds for a query whose answer is not needed."""


class BatchRequest(Protocol):
    """The batch job of a run."""

    @property
    def submission(self) -> Submission:
        """The run."""

    @property
    def rank_python(self) -> str:
        """The ranks' interpreter, which also runs `prepare`."""

    def check(self) -> None:
        """Raise UserError if the ranks' interpreter is visible here and cannot run them."""

    def script(self, submission_id: str) -> str:
        """Return the batch script, whose job has the comment `ortflow SUBMISSION_ID`. Raises UserError."""


class BatchLauncher(Generic[JobT]):
    """Runs in a batch scheduler."""

    def __init__(self, scheduler: Scheduler[JobT]) -> None:
        self.scheduler = scheduler

    def submit(self, request: Any) -> str:
        """Submit the job. Raises UserError if the scheduler or the run directory refuses it."""
        from ortflow.launchers.batch.job_submission import place, settle
        from ortflow.launchers.run_directory_lock import opened
        from ortflow.launchers.stop import interruptible

        submission, run = request.submission, request.submission.run
        scheduler, name = self.scheduler, self.scheduler.launcher
        request.check()
        request.script("")  # report invalid values before anything is created
        begun = scheduler.clock.monotonic()
        job = settle(run, scheduler, submission.retry)
        if job is not None and (job.waits or not is_settled(run.read_attempts())):
            return self._adopted(request, job)
        before = placed(run.read_attempts(), name)
        with interruptible(), opened(submission) as directory:
            if placed(run.read_attempts(), name) not in (before, []):
                directory.handed_over = True
                raise UserError(f"{run.root} was just submitted by another process")
            if directory.finished:
                return f"{name}://{before[-1].job if before else ''}"
            new_budget = begin(request, directory)
            # From here on a job may exist that needs the directory, even if this fails.
            directory.handed_over = True
            try:
                seconds_left = max(0.0, submission.retry - (scheduler.clock.monotonic() - begun))
                submission_id, job_id = place(run, request.script, scheduler, seconds_left)
            except (UserError, NoAnswer, OutOfDisk):
                directory.handed_over = False
                raise
            run.record_attempt(
                event="submit", launcher=name, job=job_id, submission=submission_id, new_budget=new_budget,
                **submit_record(),
            )  # fmt: skip
        return f"{name}://{job_id}"

    def status(self, run: RunDir) -> RunStatus:
        """From the scheduler and the run directory; from the directory alone if the scheduler does not answer."""
        if is_settled(run.read_attempts()):
            return status(run, self.scheduler, self._left())
        try:
            return status(run, self.scheduler, self.scheduler.mine(), self.scheduler.job)
        except OrtflowError as error:
            return status(run, self.scheduler, None, silence=str(error))

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The same for many runs with one query of the queue, and one of the accounting if jobs left no record."""
        scheduler = self.scheduler
        open_ones = {run.root for run in runs if not is_settled(run.read_attempts())}
        try:
            jobs = scheduler.mine() if open_ones else self._left()
            newest_jobs = [gone(run, jobs, scheduler.launcher) for run in runs if run.root in open_ones]
            missing = [job for job in newest_jobs if job is not None]
            # Another user's jobs are not in our list.
            queued_jobs = {**scheduler.in_queue(missing)}
            queued_jobs.update(scheduler.accounted([job for job in missing if job not in queued_jobs]))
            return [status(run, scheduler, jobs, queued_jobs.get) for run in runs]
        except OrtflowError as error:
            return [status(run, scheduler, None, silence=str(error)) for run in runs]

    def _left(self) -> Sequence[JobT]:
        """The jobs, for runs whose directories show how they ended; empty if the scheduler does not answer quickly."""
        try:
            return self.scheduler.mine(GLANCE)
        except OrtflowError:
            return []

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log; followed across later attempts while the job is in the queue."""
        clock = self.scheduler.clock
        active = every(POLL, lambda: self.status(run).state.active, clock) if follow else lambda: False
        return log_lines(run, attempt=attempt, rank=rank, active=active, clock=clock)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        """Remove a pending job from the queue; ask a running one to save and stop, or end it `now`."""
        from ortflow.launchers.batch.job_submission import active

        scheduler = self.scheduler
        try:
            job = active(run, scheduler)
            again = [other.id for other in find_all(by_hand(run.root), scheduler.mine()) if other.waits]
        except NoAnswer:
            # A running job sees the file even if the scheduler does not answer.
            if state(in_order(run.read_attempts()), alive=True) is not State.RUNNING:
                raise
            write_request(run.stop_request, "cancel", now=now)
            return True
        if again:
            # They would start the cancelled run.
            scheduler.cancel(*again)
        if job is None:
            return bool(again)
        if is_settled(run.read_attempts()):
            if job.waits:  # requeued by a controller that has lost its start
                scheduler.cancel(job.id)
            return bool(again) or job.waits
        if job.waits:
            scheduler.cancel(job.id, pending=True)
            job = active(run, scheduler)
            if job is not None and job.waits:  # held, in a state that `pending` may not match
                scheduler.cancel(job.id)
                job = None
            if job is None:
                record_cancelled(run)
                return True
        # The run supervisor must see the user's request: a job that only the scheduler ends is requeued.
        write_request(run.stop_request, "cancel", now=now)
        if now or job.suspended:
            try:
                scheduler.cancel(job.id)
            except NotOwner:
                # The supervisor of another user's job sees the request, unless the job is suspended.
                if job.suspended:
                    raise
            end = scheduler.clock.monotonic() + KILL
            while scheduler.clock.monotonic() < end and active(run, scheduler) is not None:
                scheduler.clock.sleep(1.0)
            record_cancelled(run)
        return True

    def _adopted(self, request: BatchRequest, job: JobT) -> str:
        """The handle of a job whose submission got no answer. Raises UserError if it got one."""
        from ortflow.workflow.spec.file.dump import dump_run_file

        run, name = request.submission.run, self.scheduler.launcher
        unanswered = next(reversed(placed(run.read_attempts(), name)), None)
        is_same_run = (
            unanswered is not None and run.run_file.read_bytes() == dump_run_file(request.submission.spec).encode()
        )
        if unanswered is not None and unanswered.job is None and is_same_run and not request.submission.fresh:
            run.record_attempt(event="submit", launcher=name, job=job.id, submission=unanswered.submission)
            return f"{name}://{job.id}"
        raise UserError(
            f"{run.root} is job {job.id} in {self.scheduler.name}, {job.state.lower()}",
            fix=f"follow it with `ortflow logs -f {run.root}`, stop it with `ortflow cancel {run.root}`",
        )


def begin(request: BatchRequest, directory: Opened) -> bool:
    """Prepare the submission: make missing files, remove an old stop request. Returns whether budgets are new."""
    from ortflow.launchers.prepare import prepare

    submission = request.submission
    prepare(submission.spec, submission.folder, request.rank_python)
    directory.run.stop_request.unlink(missing_ok=True)
    return submission.new_budget or state(in_order(directory.run.read_attempts()), alive=False) is State.FAILED


def record_cancelled(run: RunDir) -> None:
    """Record that the user cancelled the run, unless it has ended by itself."""
    if not is_settled(run.read_attempts()):
        reason = "requested by ortflow cancel"
        run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked="cancel", why=reason)


def every(seconds: float, ask: Callable[[], bool], clock: Clock = SYSTEM_CLOCK) -> Callable[[], bool]:
    """Cache the answer of `ask` for so many seconds."""
    answer, due = True, 0.0

    def asked() -> bool:
        nonlocal answer, due
        if clock.monotonic() >= due:
            answer, due = ask(), clock.monotonic() + seconds
        return answer

    return asked
