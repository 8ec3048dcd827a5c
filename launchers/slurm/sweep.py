"""A sweep as one job array: each task is a run with its own directory.

The array has one script, in which the number of the task selects the run's directory. Each run also keeps the
script of a job of its own, which follows a task that may not be requeued.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortflow.launchers.base import Submission
from ortflow.launchers.batch import submitting
from ortflow.launchers.batch.history import SETTLE, by_hand, find, in_doubt, is_settled, placed
from ortflow.launchers.slurm.commands import NoAnswer, Slurm
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.launcher import SlurmLauncher, SlurmRequest, begin, check_ranks
from ortflow.launchers.slurm.sbatch import FOLDER, SCRIPT
from ortflow.launchers.sweeps import Sweep, SweepDir, is_sweep, read_sweep
from ortflow.workflow.disk_space import OutOfDisk
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.owned import TEMPORARY, remove
from ortflow.workflow.rundir import RunDir, write_atomically

if TYPE_CHECKING:
    from ortflow.launchers.run_directory_lock import Opened

FILES = 100
"""Open files beside the locks of the runs."""
_FILES = re.compile(rf"sweep\.json|attempts\.jsonl|slurm/[\w-]+\.sh|(logs|slurm)/|(slurm/)?{TEMPORARY}")
"""Content of a sweep's folder before its first task runs."""


@dataclass(frozen=True)
class SweepRequest:
    """The job array of a sweep."""

    sweep: Sweep
    requests: tuple[SlurmRequest, ...]
    """The request of each run, by task."""
    at_once: int | None = None
    """Maximum number of tasks at a time."""

    def script(self, submission_id: str, tasks: Sequence[int], run_file: str | None = None) -> str:
        """The array's batch script; raises UserError if the runs would need several."""
        from ortflow.manifests.slurm import script
        from ortflow.manifests.slurm.placement import TASK

        root = self.sweep.root.with_name(f"{self.sweep.name}-{TASK}")
        array = ranges(tasks) + (f"%{self.at_once}" if self.at_once is not None else "")
        placement = replace(
            self.requests[0].by_hand, run_dir=root, submission=submission_id, array=array, run_file=run_file
        )
        specs = [self.requests[task].submission.spec for task in tasks]
        texts = {script(spec.model_copy(update={"name": self.sweep.name}), placement) for spec in specs}
        if len(texts) > 1:
            raise UserError(
                f"{', '.join(self.sweep.keys)} would change the batch script, and a job array has one for all its runs",
                fix="submit them one by one; if containers mount different paths, mount one folder that holds all",
            )
        return texts.pop()

    def __str__(self) -> str:
        from ortflow.manifests.slurm.script import BETWEEN
        from ortflow.workflow.spec.file.dump import dump_run_file

        files = [dump_run_file(request.submission.spec) for request in self.requests]
        submission = str(by_hand(self.sweep.root).submission)
        return self.script(submission, range(len(files)), f"{BETWEEN}\n".join(files)).rstrip("\n")


def check_length(runs: int, slurm: Slurm) -> None:
    """Raise UserError if this Slurm allows no array of so many tasks; if the limit is unknown, sbatch checks it."""
    try:
        longest = slurm.longest_array()
    except OrtflowError:
        return
    if longest is not None and runs > longest - 1:
        raise UserError(
            f"--set asks for {runs} runs, and a job array of this Slurm has at most {longest - 1} (MaxArraySize)",
            fix="give fewer values, or submit several sweeps",
        )


def request(
    sweep: Sweep, submissions: Sequence[Submission], at_once: int | None, launcher: SlurmLauncher
) -> SweepRequest:
    """Return the request for a sweep. Starts nothing."""
    first = launcher.request(submissions[0])
    alone = (SlurmRequest(one, replace(first.placement, run_dir=one.run.root)) for one in submissions)
    return SweepRequest(sweep, tuple(alone), at_once)


def submit(wanted: SweepRequest, slurm: Slurm) -> str:
    """Submit the runs that have not finished as one array; raises UserError if Slurm or a directory refuses."""
    from ortflow.launchers.run_directory_lock import opened
    from ortflow.launchers.stop import interruptible

    check_ranks(wanted.requests[0])
    str(wanted)  # report invalid values before anything is created
    sweep, fresh = wanted.sweep, wanted.requests[0].submission.fresh
    if not fresh:
        _refuse_another(sweep)
    if (known := _known(wanted, slurm)) is not None:
        return known
    before = [placed(run.read_attempts(), "slurm") for run in sweep.runs]
    _allow_files(len(before) + FILES)
    with interruptible(), ExitStack() as stack:
        ours = [stack.enter_context(opened(request.submission)) for request in wanted.requests]
        for run, earlier in zip(sweep.runs, before, strict=True):
            if placed(run.read_attempts(), "slurm") not in (earlier, []):
                raise UserError(f"{run.root} was just submitted by another process")
        tasks = [task for task, one in enumerate(ours) if not one.finished]
        if not tasks:
            return f"slurm://{_array(before[0][-1].job) if before[0] else ''}"
        renewed = {task: begin(wanted.requests[task], ours[task]) for task in tasks}
        with _on_record(sweep), _handing_over(ours):
            return _place(wanted, renewed, slurm)


def _place(wanted: SweepRequest, renewed: Mapping[int, bool], slurm: Slurm) -> str:
    """Call sbatch, with records in every directory before and after; returns the handle."""
    tasks = list(renewed)
    runs = {task: wanted.requests[task].submission.run for task in tasks}

    def script(submission: str) -> str:
        for task, run in runs.items():
            # If output cannot be written, Slurm starts nothing and reports almost nothing.
            (run.root / "logs").mkdir(exist_ok=True)
            alone = wanted.requests[task].script(f"{submission}-{task}")
            write_atomically(run.root / FOLDER / SCRIPT, alone.encode())
        return wanted.script(submission, tasks)

    folder = SweepDir(wanted.sweep.folder, runs, len(RunDir(wanted.sweep.folder).read_attempts()))
    retry = wanted.requests[0].submission.retry
    ask = f"ortflow list --sweep {wanted.sweep.root}"
    submission, job = submitting.place(folder, script, slurm, retry, ask=ask)
    array = _array(job)
    RunDir(folder.root).record_attempt(event="submit", launcher="slurm", job=array, submission=submission)
    for task, run in runs.items():
        run.record_attempt(
            event="submit", launcher="slurm", job=f"{array}_{task}", submission=submission, new_budget=renewed[task]
        )
    return f"slurm://{array}"


def _known(wanted: SweepRequest, slurm: Slurm) -> str | None:
    """The handle of an array of the same runs whose submission got no answer; None if no run is active.

    Raises UserError if another job has one.
    """
    from ortflow.workflow.spec.file.dump import dump_run_file

    runs = wanted.sweep.runs
    jobs = _jobs(runs, slurm)
    records = {task: runs[task].read_attempts() for task in jobs}
    active = [task for task, job in jobs.items() if job.active and (job.waits or not is_settled(records[task]))]
    if not active:
        return None
    unanswered = {task: one for task in jobs if (one := placed(records[task], "slurm")[-1]).job is None}
    for task in active:
        submission, job = wanted.requests[task].submission, jobs[task]
        same = runs[task].run_file.read_bytes() == dump_run_file(submission.spec).encode()
        if task not in unanswered or not same or submission.fresh:
            raise UserError(
                f"{runs[task].root} is job {job.id} in Slurm, {job.state.lower()}",
                fix=f"see `ortflow list --sweep {wanted.sweep.root}`, or stop all of them with cancel --sweep",
            )
    for task, one in unanswered.items():
        runs[task].record_attempt(event="submit", launcher="slurm", job=jobs[task].id, submission=one.submission)
    return f"slurm://{_array(jobs[active[0]].id)}"


def _jobs(runs: Sequence[RunDir], slurm: Slurm) -> dict[int, Job]:
    """The runs' jobs, by task, in one call; waits for those that may still appear. Raises NoAnswer."""
    begun = slurm.clock.monotonic()
    while True:
        histories = {
            task: history for task, run in enumerate(runs) if (history := placed(run.read_attempts(), "slurm"))
        }
        mine = slurm.mine() if histories else []
        found = {task: job for task, history in histories.items() if (job := find(history, mine)) is not None}
        doubts = [in_doubt(runs[task].read_attempts()) for task in histories if task not in found]
        if all(doubt is None or submitting.waited(doubt, begun, SETTLE, slurm.clock) for doubt in doubts):
            return found
        slurm.clock.sleep(submitting.PAUSE)


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
            fix="choose another name, or start over with --fresh, which keeps the old runs aside",
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
def _handing_over(ours: Sequence[Opened]) -> Iterator[None]:
    """Keep the directories, which jobs may need even if this fails, unless Slurm accepted no job."""
    for one in ours:
        one.handed_over = True
    try:
        yield
    except (UserError, NoAnswer, OutOfDisk):
        for one in ours:
            one.handed_over = False
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


def ranges(numbers: Sequence[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5. Pure."""
    reported = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        reported.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(reported)
