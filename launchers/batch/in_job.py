"""What the script of a batch job runs: `python -m MODULE RUN_DIR [OPTIONS] -- COMMAND`, for every scheduler.

MODULE is the launcher's own, which calls `supervise`. Takes the run for this job, or leaves it to the job that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.batch import claim
from ortflow.launchers.batch.current_job import CurrentJob
from ortflow.launchers.batch.job_supervisor import Ranks, RunSupervisor
from ortflow.launchers.batch.job_validity import is_on_record, revoked
from ortflow.launchers.batch.scheduler import Scheduler
from ortflow.launchers.records import Outcome
from ortflow.launchers.start_folder import go_back
from ortflow.manifests.batch import FOLDER, RUN_FILE
from ortflow.manifests.local import RANK_MODULE
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.streams import guard_log


def supervise(
    arguments: Sequence[str],
    job: CurrentJob,
    scheduler: Scheduler[Any],
    ranks_of: Callable[[RunDir, Sequence[str]], Ranks],
) -> int:
    """Supervise the run of a directory, whose run file may come with the script; returns the script's exit code.

    Parameters
    ----------
    arguments
        RUN_DIR, options of `ortflow.manifests.batch`, `--`, and the command that starts the ranks.
    job
        The job of this process.
    scheduler
        Its scheduler.
    ranks_of
        How ranks are started, from the run directory and the command.
    """
    guard_log()
    go_back()
    place = arguments.index("--")
    run, options, launch = RunDir(Path(arguments[0])), arguments[1:place], arguments[place + 1 :]
    comment = ""
    with suppress(OrtflowError):
        queued_job = job.query()
        comment = queued_job.comment if queued_job is not None else ""
    try:
        code = begin(run, job, scheduler, comment, options, launch)
    except (OrtflowError, OSError) as error:
        # Printed only: the records belong to the job that has the run.
        print(f"error: {error}", flush=True)
        return error.exit_code if isinstance(error, OrtflowError) else EXIT_FAILURE
    if code is not None:
        return code
    try:
        return RunSupervisor(run, ranks_of(run, launch), job, comment).keep()
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        with suppress(OSError):
            outcome = Outcome.USER_ERROR if error.exit_code == EXIT_USER else Outcome.FAILURE
            run.record_attempt(event="stop", outcome=outcome.value, cause=str(error), why="the job could not begin")
            job.leave(run)
        return error.exit_code


def begin(
    run: RunDir, job: CurrentJob, scheduler: Scheduler[Any], comment: str, options: Sequence[str], launch: Sequence[str]
) -> int | None:
    """Take the run for this job; returns the exit code if nothing is to do. Raises UserError if another job has it."""
    records = run.read_attempts()
    is_recorded, has_run_file = is_on_record(records, job.id), RUN_FILE in options
    if has_run_file and not is_recorded:
        folder = Path(options[options.index(FOLDER) + 1]) if FOLDER in options else None
        python = launch[launch.index(RANK_MODULE) - 2]
        if not claim.claim(run, job, scheduler, sys.stdin.read(), folder, python):
            print(f"this job has nothing to do: the run in {run.root} has finished", flush=True)
            return EXIT_DONE
        with suppress(OrtflowError, OSError):
            job.keep_script(run)
    else:
        if not is_recorded:
            claim.leave_to_another(run, job, scheduler)
        if reason := revoked(records, job.launcher, job.id, comment):
            print(f"this job has nothing to do: {reason}", flush=True)
            return EXIT_DONE if reason.endswith(": done") else EXIT_PREEMPTED
    if has_run_file:
        claim.redirect(run, job)
    return None
