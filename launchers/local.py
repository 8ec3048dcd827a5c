"""The launcher for this machine: mpirun under a supervisor, in the foreground or detached.

Submitting starts a supervisor (`ortflow.launchers.detached`) in its own session; `ortflow run` is the same
supervisor in the foreground (`ortflow.launchers.starting`). Status, logs and cancel communicate with it only through
the run directory, and import nothing that only starting a run needs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.launchers.attempts.locks import holder_of
from ortflow.launchers.base import Submission
from ortflow.launchers.interpreter import locate
from ortflow.launchers.logs import log_lines
from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.named_programs import trusts
from ortflow.launchers.records import next_attempt
from ortflow.launchers.start_folder import ROOT
from ortflow.launchers.status import RunStatus, read_status
from ortflow.launchers.stop import write_request
from ortflow.manifests.local import Mpi, command, environment, settings
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir

if TYPE_CHECKING:
    from ortflow.launchers.findings import Finding
    from ortflow.workflow.spec.run import RunSpec


@dataclass(frozen=True)
class LocalRequest:
    """How the ranks of a run are started here."""

    submission: Submission
    python: str
    mpi: Mpi | None
    """None if one rank runs without mpirun."""

    def start(
        self, attempt: int, spec: RunSpec | None = None, extra_variables: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of an attempt.

        If the run is elastic, `spec` is the run on the attempt's nodes, and its ranks get `extra_variables`.
        """
        spec, run = spec or self.submission.spec, self.submission.run
        variables = {**settings(spec, run.root, attempt, self.mpi), **(extra_variables or {})}
        return command(spec, run.root, self.python, self.mpi), environment(variables, os.environ, os.getcwd())

    def __str__(self) -> str:
        spec, run = self.submission.spec, self.submission.run
        run_variables = settings(spec, run.root, next_attempt(run.read_attempts()), self.mpi)
        variables = [f"{name}={value}" for name, value in run_variables.items()]
        start = shlex.join(["env", *variables, *command(spec, run.root, self.python, self.mpi)])
        return f"(cd {ROOT} && exec {start})"


class LocalLauncher:
    """Runs on this machine."""

    def request(self, submission: Submission) -> LocalRequest:
        """Return the request; without an installed MPI it names `mpirun`, and `submit` refuses it."""
        spec = submission.spec
        if spec.resources.nodes > 1 and not spec.chooses_nodes:
            raise UserError(
                f"is {spec.resources.nodes}, and the local backend has one machine",
                where="resources.nodes",
                fix="set resources.nodes=1 and give resources.ranks_per_node",
            )
        python = locate(spec.resources.python)
        mpi = None
        if spec.world_size > 1:
            setting = spec.backends.local.mpi
            mpi = find_mpi(python, setting, trusts=trusts(submission)) or Mpi(
                "openmpi" if setting == "openmpi" else "mpich", "mpirun"
            )
        return LocalRequest(submission, python, mpi)

    def submit(self, request: LocalRequest) -> str:
        """Start a detached supervisor. Raises UserError if the ranks cannot run or the directory is not free."""
        from ortflow.launchers.starting import start_detached

        start_detached(request)
        return f"local://{request.submission.run.root}"

    def status(self, run: RunDir) -> RunStatus:
        """The status from the run directory."""
        return read_status(run)

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log."""
        return log_lines(run, attempt=attempt, rank=rank, active=lambda: follow and self.status(run).state.active)

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        """Leave a request, which the supervisor and the ranks poll."""
        if holder_of(run.lock) is None:
            return False
        write_request(run.stop_request, "cancel", now=now)
        return True

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        """The findings of `doctor` on this machine."""
        from ortflow.launchers.doctor.machine import examine_machine

        return examine_machine(submission, of_user=file)
