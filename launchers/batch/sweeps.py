"""A sweep as one job array: each task is a run with its own directory, in any batch scheduler with arrays.

Each run also keeps the script of a separate job, which follows a task that may not be requeued.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ortflow.launchers.batch import job_submission as submitting
from ortflow.launchers.batch.history import SETTLE, find, in_doubt, is_settled, newest_job
from ortflow.launchers.batch.launcher import BatchLauncher, BatchRequest, begin, record_cancelled
from ortflow.launchers.batch.scheduler import BatchJob, NoAnswer, Scheduler
from ortflow.launchers.placed import Placed, placed
from ortflow.launchers.stop import write_request
from ortflow.launchers.sweeps import Sweep, SweepDir, is_sweep, read_sweep
from ortflow.manifests.batch import SCRIPT
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.system.disk_space import OutOfDisk
from ortflow.workflow.system.own_files import TEMPORARY, remove

if TYPE_CHECKING:
    from ortflow.launchers.run_directory_lock import Opened

FILES = 100
"""Open files beside the locks of the runs."""
_FILES = re.compile(
    rf"sweep\.json|attempts\.jsonl|(slurm|\.launcher)/[\w-]+\.sh|(logs|slurm|\.launcher)/|(slurm/|\.launcher/)?{TEMPORARY}"
)
"""Content of a sweep's folder before its first task runs."""


class SweepRequest(Protocol):
    """The job array of a sweep."""

    @property
    def sweep(self) -> Sweep:
        """The runs."""

    @property
    def requests(self) -> Sequence[BatchRequest]:
        """The request of each run, by task."""

    def script(self, submission_id: str, tasks: Sequence[int]) -> str:
        """Return the array's batch script; raises UserError if the runs would need several."""


def submit(sweep_request: SweepRequest, scheduler: Scheduler[Any]) -> str:
    """Submit the runs that have not finished as one array; raises UserError if the scheduler or a directory refuses."""
    from ortflow.launchers.run_directory_lock import opened
    from ortflow.launchers.stop import interruptible

    sweep_request.requests[0].check()
    str(sweep_request)  # report invalid values before anything is created
    sweep, fresh = sweep_request.sweep, sweep_request.requests[0].submission.fresh
    if not fresh:
        _refuse_another(sweep)
    retry = sweep_request.requests[0].submission.retry
    handle = submitting.answered(lambda: _known(sweep_request, scheduler), retry, scheduler.clock)
    if handle is not None:
        return handle
    before = [placed(run.read_attempts(), scheduler.launcher) for run in sweep.runs]
    _allow_files(len(before) + FILES)
    with interruptible(), ExitStack() as stack:
        directories = [stack.enter_context(opened(request.submission)) for request in sweep_request.requests]
        for run, earlier in zip(sweep.runs, before, strict=True):
            if placed(run.read_attempts(), scheduler.launcher) not in (earlier, []):
                raise UserError(f"{run.root} was just submitted by another process")
        tasks = [task for task, directory in enumerate(directories) if not directory.finished]
        if not tasks:
            return f"{scheduler.launcher}://{_array(before[0][-1].job) if before[0] else ''}"
        renewed = {task: begin(sweep_request.requests[task], directories[task]) for task in tasks}
        with _on_record(sweep), _handing_over(directories):
            return _place(sweep_request, renewed, scheduler)


def _place(request: SweepRequest, renewed: Mapping[int, bool], scheduler: Scheduler[Any]) -> str:
    """Submit the script, with records in every directory before and after; returns the handle."""
    name, tasks = scheduler.launcher, list(renewed)
    runs = {task: request.requests[task].submission.run for task in tasks}

    def script(submission: str) -> str:
        for task, run in runs.items():
            # If output cannot be written, a scheduler starts nothing and reports almost nothing.
            (run.root / "logs").mkdir(exist_ok=True)
            task_script = request.requests[task].script(f"{submission}-{task}")
            write_atomically(run.root / scheduler.folder / SCRIPT, task_script.encode())
        return request.script(submission, tasks)

    folder = SweepDir(request.sweep.folder, runs, len(RunDir(request.sweep.folder).read_attempts()))
    retry = request.requests[0].submission.retry
    ask = f"ortflow list --sweep {request.sweep.root}"
    submission, job = submitting.place(folder, script, scheduler, retry, ask=ask)
    array = _array(job)
    RunDir(folder.root).record_attempt(event="submit", launcher=name, job=array, submission=submission)
    for task, run in runs.items():
        run.record_attempt(
            event="submit",
            launcher=name,
            job=f"{array}_{task}",
            submission=submission,
            new_budget=renewed[task],
        )
    return f"{name}://{array}"


def _known(request: SweepRequest, scheduler: Scheduler[Any]) -> str | None:
    """The handle of an array of the same runs whose submission got no answer; None if no run is active.

    Raises UserError if another job has one.
    """
    from ortflow.workflow.spec.file.dump import dump_run_file

    runs, name = request.sweep.runs, scheduler.launcher
    jobs = _jobs(runs, scheduler)
    records = {task: runs[task].read_attempts() for task in jobs}
    active = [task for task, job in jobs.items() if job.active and (job.waits or not is_settled(records[task]))]
    if not active:
        return None
    unanswered = {task: placed_task for task in jobs if (placed_task := placed(records[task], name)[-1]).job is None}
    for task in active:
        submission, job = request.requests[task].submission, jobs[task]
        is_same_run = runs[task].run_file.read_bytes() == dump_run_file(submission.spec).encode()
        if task not in unanswered or not is_same_run or submission.fresh:
            raise UserError(
                f"{runs[task].root} is job {job.id} in {scheduler.name}, {job.state.lower()}",
                fix=f"see `ortflow list --sweep {request.sweep.root}`, or stop all of them with cancel --sweep",
            )
    for task, placed_task in unanswered.items():
        runs[task].record_attempt(event="submit", launcher=name, job=jobs[task].id, submission=placed_task.submission)
    return f"{name}://{_array(jobs[active[0]].id)}"


def _jobs(runs: Sequence[RunDir], scheduler: Scheduler[Any]) -> dict[int, BatchJob]:
    """The runs' jobs, by task, in one call; waits for those that may still appear. Raises NoAnswer."""
    begun, name = scheduler.clock.monotonic(), scheduler.launcher
    while True:
        histories = {task: history for task, run in enumerate(runs) if (history := placed(run.read_attempts(), name))}
        jobs = _found(histories, scheduler) if histories else {}
        doubts = [in_doubt(runs[task].read_attempts()) for task in histories if task not in jobs]
        if all(doubt is None or submitting.waited(doubt, begun, SETTLE, scheduler.clock) for doubt in doubts):
            return jobs
        scheduler.clock.sleep(submitting.PAUSE)


def _refuse_another(sweep: Sweep) -> None:
    """Raise UserError if a sweep of this name exists whose runs have other values."""
    if not is_sweep(sweep.root):
        return
    earlier = read_sweep(sweep.root)
    if [member.values for member in earlier.members] == [member.values for member in sweep.members]:
        return
    if any(run.run_file.exists() for run in earlier.runs):
        raise UserError(
            f"{sweep.folder} is another sweep, of {len(earlier.members)} runs over {', '.join(earlier.keys)}",
            fix="choose another name, or start over with --fresh, which renames the old runs",
        )


@contextmanager
def _on_record(sweep: Sweep) -> Iterator[None]:
    """Write the sweep's record before the block; if nothing is submitted, restore it."""
    new = not sweep.folder.exists()
    earlier = read_sweep(sweep.root) if is_sweep(sweep.root) else None
    try:
        sweep.write()
        yield
    except (UserError, NoAnswer, OutOfDisk):
        if new:
            remove(sweep.folder, _FILES)
        elif earlier is not None:
            earlier.write()
        raise


@contextmanager
def _handing_over(directories: Sequence[Opened]) -> Iterator[None]:
    """Keep the directories, which jobs may need even if this fails, unless the scheduler accepted no job."""
    for directory in directories:
        directory.handed_over = True
    try:
        yield
    except (UserError, NoAnswer, OutOfDisk):
        for directory in directories:
            directory.handed_over = False
        raise


def _allow_files(count: int) -> None:
    """Raise the limit of open files for the locks of all runs."""
    count += len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _array(job: str | None) -> str:
    """The array of a task."""
    return (job or "").partition("_")[0]


def cancel(runs: Sequence[RunDir], scheduler: Scheduler[Any], *, now: bool) -> int:
    """Ask the runs to end, as `BatchLauncher.cancel` does for one; returns how many were active. Raises NoAnswer."""
    jobs = _unfinished(runs, scheduler)
    at_work: Mapping[int, BatchJob] = jobs
    if waiting := {task: job for task, job in jobs.items() if job.waits}:
        scheduler.cancel(*(job.id for job in waiting.values()), pending=True)
        remaining_jobs = _unfinished(runs, scheduler)
        # Held jobs may be in a state that `pending` does not match.
        held_jobs = {task: job for task, job in remaining_jobs.items() if job.waits}
        if held_jobs:
            scheduler.cancel(*(job.id for job in held_jobs.values()))
        for task in waiting.keys() - (remaining_jobs.keys() - held_jobs.keys()):
            record_cancelled(runs[task])
        at_work = {task: job for task, job in remaining_jobs.items() if not job.waits}
    for task in at_work:
        write_request(runs[task].stop_request, "cancel", now=now)
    if now or any(job.suspended for job in at_work.values()):
        # They are already stopping: waiting for one after the other costs no time.
        launcher = BatchLauncher(scheduler)
        for task in at_work:
            launcher.cancel(runs[task], now=now)
    return len(jobs)


def _unfinished(runs: Sequence[RunDir], scheduler: Scheduler[Any]) -> dict[int, BatchJob]:
    """The jobs of unfinished runs, by task."""
    records = {task: run_records for task, run in enumerate(runs) if not is_settled(run_records := run.read_attempts())}
    jobs = _found({task: placed(run_records, scheduler.launcher) for task, run_records in records.items()}, scheduler)
    return {task: job for task, job in jobs.items() if job.active}


def _found(histories: Mapping[int, Sequence[Placed]], scheduler: Scheduler[Any]) -> dict[int, BatchJob]:
    """The jobs of runs, by task; also those of another member of a group, which are not in this user's list."""
    own_jobs = scheduler.mine()
    jobs = {task: job for task, history in histories.items() if (job := find(history, own_jobs)) is not None}
    newest = {task: job for task, history in histories.items() if (job := newest_job(history)) is not None}
    # A scheduler may show the ended tasks of an array as one.
    own_arrays = {_array(job.id) for job in own_jobs}
    ended = [task for task in newest if task not in jobs or not jobs[task].active]
    missing = {task: newest[task] for task in ended if _array(newest[task]) not in own_arrays}
    other_jobs = scheduler.in_queue([*missing.values()])
    return jobs | {task: other_jobs[job] for task, job in missing.items() if job in other_jobs}
