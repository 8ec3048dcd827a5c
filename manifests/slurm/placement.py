"""What the launcher has found out about a cluster: everything that a script needs beside the run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortflow.manifests.local import MpiKind

TASK = "\0"
"""In `run_dir`: where the number of the task stands, in a job array that is several runs. In no text of a user's."""

Start = Literal["pmi2", "pmix", "none", "mpirun"]


@dataclass(frozen=True)
class Placement:
    """Where a run lies and how its ranks are started."""

    run_dir: Path
    """Absolute, on storage that every node sees."""
    run_supervisor_python: str
    """Interpreter of the batch step."""
    rank_python: str
    """Interpreter of the ranks; a container brings its own."""
    start: Start
    """srun's --mpi, or mpirun."""
    submission: str
    """Unique: by it a job is found again whose submission got no answer."""
    mpirun: str | None = None
    """Its absolute path, where it starts the ranks."""
    kind: MpiKind | None = None
    """Whose MPI the ranks have, where that is known; needed with mpirun."""
    expedite: bool = False
    """Slurm knows --requeue=expedite (25.11 and newer)."""
    dependency: str | None = None
    """Wins over the run file's."""
    array: str | None = None
    """Tasks of a job array as Slurm writes them, such as 0-7%2: each is a run, and `run_dir` holds TASK."""
    run_file: str | None = None
    """The run file's text, where the script brings it along: it is handed to sbatch by a person."""
    prepare_in: Path | None = None
    """Folder of the run file, where its `prepare` runs; with `run_file` only."""
    code: Path | None = None
    """Folder of the ortflow that was brought along by whoever submits from outside; wins over one that is installed."""
