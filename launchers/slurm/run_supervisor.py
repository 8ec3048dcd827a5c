"""The batch step of a run's Slurm job: `python -m ortflow.launchers.slurm.run_supervisor RUN_DIR -- SRUN …`.

What it does is in `ortflow.launchers.batch`; here is how ranks are started under Slurm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortflow.launchers.batch.in_job import supervise
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.current_job import SlurmJob
from ortflow.launchers.slurm.deadlines import deadlines
from ortflow.launchers.slurm.runner import run_in_job
from ortflow.launchers.slurm.step import StepAttempt
from ortflow.launchers.supervision.attempt import RankCommand
from ortflow.manifests.local import MpiKind
from ortflow.manifests.slurm import Placement, settings
from ortflow.manifests.slurm.launch import sized
from ortflow.manifests.slurm.placement import Start
from ortflow.workflow.errors import EXIT_USER
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.nodes import CHOSEN, VARIABLE
from ortflow.workflow.spec.run import RunSpec

OURS = ("ORTFLOW_", "SLURM_")
STARTS: tuple[Start, ...] = ("pmi2", "pmix", "none")


class SlurmRanks:
    """Ranks started by the command of the batch script, which `run` and `launch` give."""

    def __init__(self, run: RunDir, launch: Sequence[str]) -> None:
        self._run, self._launch, self._placement = run, list(launch), placement_of(run, launch)

    def start(self, spec: RunSpec, number: int, environment: Mapping[str, str]) -> StepAttempt:
        """Start an attempt. Variables of MPI that the user's prologue has set win over the defaults."""
        variables = settings(spec, self._placement)
        additions = {
            name: value for name, value in variables.items() if name not in environment or name.startswith(OURS)
        }
        mpirun = self._placement.kind if self._placement.start == "mpirun" else None
        if spec.program is not None:
            additions |= deadlines(Slurm(run_in_job), environment)
        names = [name for name in environment.get(CHOSEN, "").split(",") if name]
        launch = sized(self._launch, spec, names) if VARIABLE in environment else self._launch
        return StepAttempt(RankCommand(self._run, number, launch, {**environment, **additions}), mpirun)

    def lead(self, spec: RunSpec) -> float:
        """Seconds ahead of the time limit at which the ranks save."""
        return spec.backends.slurm.signal_seconds


def placement_of(run: RunDir, launch: Sequence[str]) -> Placement:
    """How a command starts the ranks, parsed from it: an administrator may have changed the script. Pure."""
    kind: MpiKind = "openmpi" if {"--map-by", "--mpi=pmix"} & set(launch) else "mpich"
    start: Start = "mpirun"
    if Path(launch[0]).name == "srun":
        start = next((mode for mode in STARTS if f"--mpi={mode}" in launch), "none")
    return Placement(run.root, sys.executable, sys.executable, start, submission="", kind=kind)


def main(arguments: list[str]) -> int:
    """Supervise the run of this job."""
    if "SLURM_JOB_ID" not in os.environ:
        print("error: this batch script runs only inside a Slurm job: submit it with sbatch", flush=True)
        return EXIT_USER
    return supervise(arguments, SlurmJob.from_environment(), Slurm(), SlurmRanks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
