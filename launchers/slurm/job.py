"""A run's job with the interface of submitit: `state`, `stdout()`, `done()`, `result()`, `cancel()`.

`submitit.SlurmJob(RUN_DIR/slurm, JOB)` itself finds log and result there, because the supervisor process writes them
under submitit's names (`ortflow.launchers.slurm.outcome`). What it cannot do is done here: report a state without
accounting, follow a run into the next job, and use a folder whose name contains `%j`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from submitit.core import logger
from submitit.core.utils import JobPaths, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from ortflow.launchers.batch.history import newest_job
from ortflow.launchers.placed import placed
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.jobs import AT_WORK, WAITING
from ortflow.launchers.slurm.launcher import SlurmLauncher
from ortflow.launchers.slurm.outcome import follower, outcome, result_file
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir

BETWEEN = {"UNKNOWN", "PREEMPTED", "NODE_FAIL"}
"""States that a job may have for a moment before Slurm requeues it."""


class RunPaths(JobPaths):  # type: ignore[misc]  # types are not followed into submitit
    """submitit's names of files, in a folder whose own name is not expanded."""

    @property
    def folder(self) -> Path:
        return Path(self._folder)

    def _format_id(self, path: Path | str) -> Path:
        name: Path = super()._format_id(Path(path).name)
        return self.folder / name


class Watcher(SlurmInfoWatcher):  # type: ignore[misc]
    """Queries the controller first, then the accounting for jobs that it has forgotten."""

    slurm = Slurm()

    def update(self) -> None:
        self._num_calls += 1
        open_ids = self._registered - self._finished
        try:
            own_jobs = {job.id: job for job in self.slurm.mine()} if open_ids else {}
            for job_id in open_ids:
                if (job := own_jobs.get(job_id) or self.slurm.job(job_id)) is not None:
                    self._info_dict[job_id] = {"JobID": job_id, "State": job.state, "NodeList": job.nodes}
        except OrtflowError as error:
            logger.get_logger().warning(str(error))
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in open_ids if self.is_done(job_id, mode="cache")}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode=mode).upper() not in WAITING | AT_WORK | BETWEEN


def _cancel(run: RunDir, job: str) -> None:
    """Cancel a run, unless it has been submitted again since."""
    records = run.read_attempts()
    newest = newest_job(placed(records, "slurm"))
    if newest == follower(records, job):
        with suppress(OrtflowError):
            SlurmLauncher().cancel(run, now=False)


class RunJob(SlurmJob):  # type: ignore[misc]
    """The job of the run whose directory holds `folder`; at a site without requeueing, the newest one."""

    watcher = Watcher(delay_s=60)
    _ending: weakref.finalize[..., RunJob] | None = None

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self.run = RunDir(Path(folder).absolute().parent)
        super().__init__(folder, job_id, tasks)

    @property
    def job_id(self) -> str:
        """Slurm's number."""
        return follower(self.run.read_attempts(), self._job_id)

    @property
    def paths(self) -> RunPaths:
        """The paths of log and result."""
        return RunPaths(self.run.root / "slurm", job_id=self.job_id, task_id=self.task_id)

    def cancel(self, check: bool = True) -> None:
        """Ask the run to save and stop, as `ortflow cancel` does; `check` waits for that."""
        SlurmLauncher().cancel(self.run, now=False)
        if check:
            self.wait()

    def cancel_at_deletion(self, value: bool = True) -> RunJob:
        """Whether the run is cancelled when this object is deleted, at the latest when the interpreter exits.

        submitit's `__del__` is too late for the latter: nothing can be imported any more, and the job would be left.
        """
        if self._ending is not None:
            self._ending.detach()
        self._ending = weakref.finalize(self, _cancel, self.run, self._job_id) if value else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: only this object cancels the run."""
        return {**super().__getstate__(), "_ending": None}

    def done(self, force_check: bool = False) -> bool:
        """Whether the run has ended, successfully or not; Slurm's state counts if the run left no record."""
        if result_file(self.run, self.job_id).exists():
            return True
        if not self.watcher.is_done(self.job_id, mode="force" if force_check else "standard"):
            return False
        # Another job may follow one that is over.
        return not SlurmLauncher().status(self.run).state.active

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        if result_file(self.run, self.job_id).exists():
            answer: tuple[str, Any] = super()._get_outcome_and_result()
            return answer
        # The job is gone without a result: use the run directory and Slurm.
        kind, reported_instead = outcome(SlurmLauncher().status(self.run))
        if kind == "success":
            return kind, reported_instead
        raise UncompletedJobError(reported_instead)
