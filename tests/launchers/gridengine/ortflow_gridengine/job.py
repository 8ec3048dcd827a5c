"""What a job runs: `python -m ortflow_gridengine.job RUN_DIR [OPTIONS] -- COMMAND`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortflow.launchers.batch.current_job import CurrentJob, Fate, ignore_signals
from ortflow.launchers.batch.in_job import supervise
from ortflow.launchers.batch.scheduler import Refused
from ortflow.launchers.mpi import kind_of
from ortflow.launchers.supervision.attempt import Attempt, RankCommand
from ortflow.manifests.local import Mpi, environment, settings
from ortflow.workflow.errors import EXIT_USER
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.clock import SYSTEM_CLOCK
from ortflow_gridengine.commands import GridEngine, Job

LEAD = 30.0
"""Seconds ahead of the time limit at which ranks save."""


class GridEngineJob(CurrentJob):
    """The job of this process."""

    launcher, scheduler = GridEngine.launcher, GridEngine.name
    stay = 0.0  # a job that is queued again or deleted may end by itself

    def __init__(self, id: str, restarts: int, node: str) -> None:
        super().__init__(id, restarts, node)
        self._cluster, self._began = GridEngine(ignore_signals), SYSTEM_CLOCK.monotonic()

    def query(self) -> Job | None:
        return next((job for job in self._cluster.mine() if job.id == self.id), None)

    def fate_of(self, job: Job) -> Fate:
        if job.waits:
            return Fate.QUEUED
        return Fate.CANCELLED if job.ending else Fate.RUNNING

    def requeue(self) -> None:
        done = self._cluster.run("qmod", "-rj", self.id)
        if done.returncode:
            raise Refused(done.stdout.strip())

    def cancel(self) -> None:
        self._cluster.cancel(self.id)

    def seconds_left(self) -> float | None:
        job = self.query()
        return None if job is None or job.limit is None else self._began + job.limit - SYSTEM_CLOCK.monotonic()

    def follow_up(self, script: Path) -> str:
        return self._cluster.submit(script, "-hold_jid", self.id)


class Ranks:
    """Ranks on the host of the job, as the local launcher starts them."""

    def __init__(self, run: RunDir, launch: Sequence[str]) -> None:
        self._run, self._launch = run, list(launch)

    def start(self, spec: RunSpec, number: int, variables: Mapping[str, str]) -> Attempt:
        kind = kind_of(self._launch[0]) if spec.world_size > 1 else None
        mpi = Mpi(kind, self._launch[0]) if kind is not None else None
        own = {**settings(spec, self._run.root, number, mpi), "ORTFLOW_LAUNCHER": GridEngine.launcher}
        # Hydra would start the ranks through qrsh.
        outer = {name: value for name, value in variables.items() if name != "PE_HOSTFILE"}
        command = RankCommand(self._run, number, self._launch, environment(own, outer, os.getcwd()))
        return Attempt(command, spec.world_size, kind)

    def lead(self, spec: RunSpec) -> float:
        return LEAD


def main(arguments: list[str]) -> int:
    """Supervise the run of this job."""
    if "SGE_TASK_ID" not in os.environ:
        print("error: this batch script runs only inside a Grid Engine job: submit it with qsub", flush=True)
        return EXIT_USER
    job = GridEngineJob(os.environ["JOB_ID"], int(os.environ.get("RESTARTED", "0")), os.uname().nodename)
    return supervise(arguments, job, GridEngine(), Ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
