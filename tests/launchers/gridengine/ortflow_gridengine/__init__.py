"""A launcher for Grid Engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ortflow.launchers.base import Submission
from ortflow.launchers.batch.history import by_hand
from ortflow.launchers.batch.launcher import BatchLauncher
from ortflow.launchers.interpreter import check, examine, locate
from ortflow.launchers.mpi import find_mpi
from ortflow.manifests import batch
from ortflow.manifests.local import Mpi, command
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.installed import options_of
from ortflow.workflow.spec.units import parse_time
from ortflow_gridengine.commands import GridEngine, Job
from ortflow_gridengine.options import GridEngineOptions

SUPERVISOR = "ortflow_gridengine.job"


@dataclass(frozen=True)
class GridEngineRequest:
    """The batch job of a run."""

    submission: Submission
    options: GridEngineOptions
    rank_python: str
    mpi: Mpi | None

    def check(self) -> None:
        """Raise UserError if the ranks' interpreter cannot run them."""
        check(examine(self.rank_python))

    def script(self, submission_id: str, run_file: str | None = None) -> str:
        """The batch script; `run_file` for one that a person submits."""
        run = self.submission.run.root
        start = batch.supervisor(
            sys.executable, SUPERVISOR, run, has_run_file=run_file is not None, folder=self.submission.folder
        )
        ranks = command(self.submission.spec, run, self.rank_python, self.mpi)
        lines = [
            "#!/bin/bash",
            *(f"#$ {words}" for words in self.directives(submission_id, log=run_file is None)),
            "trap '' USR1 USR2",  # before the supervisor handles them
            batch.LEAVE,
            *batch.with_input([f"exec {shlex.join([*start, *ranks])}"], run_file),
        ]
        return "\n".join(lines) + "\n"

    def directives(self, submission_id: str, *, log: bool) -> Iterator[str]:
        """qsub's options: `-notify` sends SIGUSR2 before a job is killed, `-r y` allows a restart."""
        spec, options = self.submission.spec, self.options
        yield f"-N {spec.name}"
        yield f"-S /bin/bash -V -notify -r y -j y -ac ortflow={submission_id}"
        if not log:
            yield "-cwd"  # a run directory that the job makes cannot hold its output yet
        else:
            yield f"-o {shlex.quote(str(self.submission.run.root))}/logs/gridengine-$JOB_ID.log"
        if options.queue is not None:
            yield f"-q {options.queue}"
        if spec.world_size > 1:
            yield f"-pe {options.parallel_environment} {spec.world_size}"
        if spec.resources.time_limit is not None:
            yield f"-l h_rt={parse_time(spec.resources.time_limit)}"

    def __str__(self) -> str:
        submission = str(by_hand(self.submission.run.root).submission)
        return self.script(submission, dump_run_file(self.submission.spec)).rstrip("\n")


class GridEngineLauncher(BatchLauncher[Job]):
    """Runs in Grid Engine."""

    def __init__(self) -> None:
        super().__init__(GridEngine())

    def request(self, submission: Submission) -> GridEngineRequest:
        """Return the request. Starts nothing."""
        spec, python = submission.spec, locate(submission.spec.resources.python)
        mpi = find_mpi(python, spec.backends.local.mpi) if spec.world_size > 1 else None
        if spec.world_size > 1 and mpi is None:
            raise UserError(f"{spec.world_size} ranks need an MPI, and there is none beside {python} or on the PATH")
        return GridEngineRequest(submission, options_of(spec, "gridengine", GridEngineOptions), python, mpi)
