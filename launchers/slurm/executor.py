"""submitit's executor for Slurm, with a batch script of ours in place of its pickle.

The only module that imports submitit, and imported when something is submitted. submitit's own `sbatch` has no
time-out and its workers know nothing of ranks that agree, so both are ours; the job folder is laid out as submitit
does, so that `submitit.SlurmJob(folder, job_id)` finds its way there.
"""

from __future__ import annotations

from pathlib import Path

from submitit.slurm.slurm import SlurmExecutor

from ortflow.launchers.slurm.commands import Settings, Slurm
from ortflow.workflow.rundir import write_atomically

SCRIPT = "job.sh"


class BatchExecutor(SlurmExecutor):  # type: ignore[misc]  # types are not followed into submitit
    """Submits one script; `folder` holds it."""

    def __init__(self, folder: Path, slurm: Slurm, text: str, settings: Settings) -> None:
        super().__init__(folder)
        self._slurm, self._text, self._settings = slurm, text, settings

    @classmethod
    def affinity(cls) -> int:
        """submitit looks for srun on the PATH; whether there is a Slurm is asked of it."""
        return 2

    def submit_script(self) -> str:
        """Submit and return the job's id. Raises what `Slurm.submit` raises."""
        script = Path(self.folder) / SCRIPT
        write_atomically(script, self._make_submission_file_text(self._text, "").encode())
        job = self._slurm.submit(str(script), self._settings)
        # Not by submitit's own paths, nor as its job: both read %j, %t, %a and %A in a folder's name.
        write_atomically(Path(self.folder) / f"{job.partition('_')[0]}_submission.sh", self._text.encode())
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return command
