"""Passing a script to sbatch: its file in the run directory, and the environment. Used by `commands.Slurm`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ortflow.manifests.batch import SCRIPT
from ortflow.manifests.local import absolute_entries
from ortflow.workflow.run.rundir import write_atomically

FOLDER = "slurm"
"""In the run directory: the script, and the files that `submitit.SlurmJob` reads."""

NOT_SENT = re.compile(r"connect failure|Connection refused", re.IGNORECASE)
"""sbatch has reached no controller: nothing was submitted."""
_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_NAMES = {
    "timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array", "wait": "wait",
}  # fmt: skip
"""Environment variables of sbatch that are not named like their option."""
# SBATCH_WAIT, for one, would have sbatch return only at the end of the job.
_NEVER = {"array", "wait", "error", "input", "wrap"}
"""Options that a submission must not take from the environment."""


def lay_out(root: Path, script: str) -> Path:
    """Write the script into the run directory; returns its path."""
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    # If a batch job's output cannot be written, Slurm starts nothing and reports almost nothing.
    (root / "logs").mkdir(exist_ok=True)
    write_atomically(folder / SCRIPT, script.encode())
    return folder / SCRIPT


def keep(root: Path, script: str, job: str) -> None:
    """Put the script of a job where `submitit.SlurmJob` looks for it."""
    write_atomically(root / FOLDER / f"{job.partition('_')[0]}_submission.sh", script.encode())


def settings(script: str, environment: Mapping[str, str], folder: Path) -> Mapping[str, str | None]:
    """Changes to the environment that sbatch reads and passes on to the job. Pure.

    Variables of sbatch override directives: those that would change the script's settings are removed. Entries of
    PYTHONPATH are relative to `folder`, because the job runs elsewhere.
    """
    options = {*_DIRECTIVE.findall(script), *_NEVER} | ({"requeue"} if "#SBATCH --no-requeue" in script else set())
    changes: dict[str, str | None] = {}
    for name in environment:
        option = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and _NAMES.get(option, option) in options:
            changes[name] = None
    if entries := environment.get("PYTHONPATH"):
        changes["PYTHONPATH"] = absolute_entries(entries, str(folder))
    return changes
