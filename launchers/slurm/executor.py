"""submitit's executor for runs: its parameters and its jobs, for a run file in place of a function.

    from ortflow.slurm import SlurmExecutor

    executor = SlurmExecutor("runs")
    executor.update_parameters(slurm_partition="gpu", timeout_min=60, slurm_additional_parameters={"licenses": "a:1"})
    job = executor.submit("run.yaml", "train.steps=1000")
    job.state, job.stdout(), job.result()

A run is submitted as by `ortflow submit`, so every command works on it. Only this module and `job` import submitit,
which the command line does not need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor as Submitit

from ortflow.launchers.base import Submission
from ortflow.launchers.slurm.job import RunJob
from ortflow.launchers.slurm.launcher import SlurmLauncher
from ortflow.launchers.slurm.parameters import KEYS, OTHERS, overrides, renamed
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths


class SlurmExecutor(Submitit):  # type: ignore[misc]  # types are not followed into submitit
    """Submits runs; `folder` is that of the runs. `submit(RUN_FILE, "KEY=VALUE", …)` returns the job.

    Parameters override the run file, and KEY=VALUE overrides both. `submit` raises UserError and Faults.
    """

    job_class = RunJob

    def __init__(self, folder: Path | str = "runs", *, fresh: bool = False) -> None:
        super().__init__(folder)
        self._fresh = fresh
        self._launcher = SlurmLauncher()

    @classmethod
    def affinity(cls) -> int:
        """submitit looks for srun on the PATH; ortflow queries Slurm itself."""
        return 2

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*KEYS, *OTHERS}

    def _internal_update_parameters(self, **parameters: Any) -> None:
        self.parameters.update(renamed(parameters))

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> list[RunJob]:
        """Every run is a separate job, also in a batch. If one is refused, no job of the batch is left."""
        submissions = [self._read(delayed) for delayed in delayed_submissions]
        names = Counter(run.root for _, run in submissions)
        if twice := [str(root) for root, count in names.items() if count > 1]:
            raise UserError(
                f"several runs of one call have the directory {', '.join(twice)}",
                fix="give each a name: map_array(run_file, ['name=a', …], …)",
            )
        jobs: list[RunJob] = []
        try:
            for submission, run in submissions:
                jobs.append(self._place(submission, run))
        except BaseException:
            for job in jobs:
                with suppress(OrtflowError):
                    job.cancel(check=False)
            raise
        return jobs

    def _read(self, delayed: DelayedSubmission) -> tuple[Submission, RunDir]:
        file = delayed.function
        if not isinstance(file, (str, Path)) or delayed.kwargs:
            raise UserError(
                f"{file!r} is not a run file", fix="submit(RUN_FILE, 'KEY=VALUE', …); functions are for submitit's own"
            )
        path = Path(file)
        values = [*overrides(self.parameters), *map(str, delayed.args)]
        spec = load_run_file(path, values, files=True)
        if spec.run_dir is None:
            spec = spec.model_copy(update={"run_dir": str(Path(self.folder) / spec.name)})
        spec = resolve_paths(spec, path)
        run = RunDir(Path(str(spec.run_dir)))
        return Submission(spec, run, path.absolute().parent, fresh=self._fresh), run

    def _place(self, submission: Submission, run: RunDir) -> RunJob:
        handle = self._launcher.submit(self._launcher.request(submission))
        return RunJob(run.root / "slurm", handle.removeprefix("slurm://"))
