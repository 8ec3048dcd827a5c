"""Running one of Slurm's commands on this machine, outside of any job around this shell.

A `Runner` is what `commands` gets its answers through, so that a connection to another machine can be inserted.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ortflow.launchers.batch import current_job
from ortflow.manifests.local import FOREIGN

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")
"""Variables that select the cluster; Slurm's others are those of a job around this shell, or change answers."""
OURS = ("SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
Settings = Mapping[str, str | None]
"""Variables of a command beside those of the shell; None removes one."""
_PREFIX = re.compile(r"^(?:sbatch|squeue|scontrol|sacct|scancel|srun): (?:error|fatal): *", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Its error message on one line, without the command's name."""
        return "; ".join(line.strip() for line in _PREFIX.sub("", self.err or self.out).splitlines() if line.strip())


Runner = Callable[[Sequence[str], Settings, float], Answer]
"""Runs a command with a time-out in seconds. Raises FileNotFoundError if the command is missing, and
subprocess.TimeoutExpired."""


def run_in_job(command: Sequence[str], settings: Settings, seconds: float) -> Answer:
    """The runner in a job: Slurm signals every process of a job that it ends."""
    return run_here(command, settings, seconds, current_job.ignore_signals)


def run_here(
    command: Sequence[str], settings: Settings, seconds: float, before: Callable[[], None] | None = None
) -> Answer:
    """The runner for this machine; the child process calls `before` first."""
    environment = outside_of_jobs(os.environ)
    for name, value in settings.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, env=environment, errors="replace",
        start_new_session=before is not None, preexec_fn=before,
    )  # fmt: skip
    return Answer(result.returncode, result.stdout, result.stderr)


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the job around this shell and without defaults for commands that are parsed. Pure."""
    foreign = (*FOREIGN, *OURS)
    return {name: value for name, value in environment.items() if name in KEPT or not name.startswith(foreign)}
