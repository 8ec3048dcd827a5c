"""Handing a script to sbatch: its file in the run directory, and the environment. Used by `commands.Slurm`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ortflow.workflow.rundir import write_atomically

FOLDER = "slurm"
"""In the run directory: the script, and what `submitit.SlurmJob` finds of a job."""
SCRIPT = "job.sh"

NOT_SENT = re.compile(r"connect failure|Connection refused", re.IGNORECASE)
"""sbatch has reached nobody: there is no doubt."""
_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_NAMES = {
    "timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array", "wait": "wait",
}  # fmt: skip
"""Environment variables of sbatch that are not called as their option is."""
_NEVER = {"array", "wait", "error", "input", "wrap"}
"""Options that no submission of a run may take from the environment."""


def lay_out(root: Path, script: str) -> Path:
    """Write the script into the run directory; its path."""
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    # Where a batch job's output cannot be written, Slurm starts nothing and says next to nothing.
    (root / "logs").mkdir(exist_ok=True)
    write_atomically(folder / SCRIPT, script.encode())
    return folder / SCRIPT


def keep(root: Path, script: str, job: str) -> None:
    """Leave the script of a job where `submitit.SlurmJob` looks for it."""
    write_atomically(root / FOLDER / f"{job.partition('_')[0]}_submission.sh", script.encode())


def settings(script: str, environment: Mapping[str, str], folder: Path) -> Mapping[str, str | None]:
    """What changes in the environment that sbatch reads, and hands on to the job. Pure.

    Variables of sbatch win over directives: those that would change what the script says are taken away. Relative
    entries of PYTHONPATH become absolute, seen from `folder`, because the job runs elsewhere.
    """
    said = {*_DIRECTIVE.findall(script), *_NEVER} | ({"requeue"} if "#SBATCH --no-requeue" in script else set())
    changes: dict[str, str | None] = {}
    for name in environment:
        option = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and _NAMES.get(option, option) in said:
            changes[name] = None
    if entries := environment.get("PYTHONPATH"):
        changes["PYTHONPATH"] = os.pathsep.join(os.path.join(folder, entry) for entry in entries.split(os.pathsep))
    return changes
