"""Facts about a cluster from the launcher: everything that a script needs besides the run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortflow.manifests.local import MpiKind

TASK = "\0"
"""Placeholder in `run_dir` for a task's number, in a job array of several runs. Occurs in no text of a user."""

Start = Literal["pmi2", "pmix", "none", "mpirun"]


@dataclass(frozen=True)
class Placement:
    """Where a run lies and how its ranks are started."""

    run_dir: Path
    """Absolute path, on storage that every node sees."""
    run_supervisor_python: str
    """Interpreter of the batch step."""
    rank_python: str
    """Interpreter of the ranks; a container has its own."""
    start: Start
    """srun's --mpi, or mpirun."""
    submission: str
    """Unique id, by which a job is found if its submission got no answer."""
    mpirun: str | None = None
    """Absolute path of the program that starts the ranks."""
    kind: MpiKind | None = None
    """MPI implementation of the ranks, if known; needed with mpirun."""
    expedite: bool = False
    """Whether Slurm supports --requeue=expedite (25.11 and newer)."""
    dependency: str | None = None
    """Takes precedence over the run file's."""
    array: str | None = None
    """Tasks of a job array as Slurm writes them, such as 0-7%2: each is a run, and `run_dir` contains TASK."""
    run_file: str | None = None
    """Text of the run file, if the script contains it because a person submits it."""
    prepare_in: Path | None = None
    """Folder of the run file, where its `prepare` runs; with `run_file` only."""
    code: Path | None = None
    """Folder of an ortflow that was copied to the cluster for a submission from outside; precedes an installed one."""
