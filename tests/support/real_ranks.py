"""Programs on several real MPI ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from project import FEW_CORES, MPICH_SUMS
from waits import PATIENCE


def on_ranks(count: int, *arguments: str, timeout: float = 2 * PATIENCE, **variables: str) -> str:
    """Run Python with these arguments on `count` ranks, and return what they print.

    Ranks that wait yield the core. With `MPICH_SUMS` (project.py) among the variables they wait as in users' runs.

    Raises
    ------
    AssertionError
        If a rank fails; with the output of all.
    """
    # The MPI that is installed with this Python has its mpirun beside it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["mpirun", "-n", str(count), sys.executable, *arguments],
        env={**os.environ, "PATH": path, **FEW_CORES, **variables},
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def all_good(count: int, program: str, *arguments: str, timeout: float = 2 * PATIENCE, **variables: str) -> None:
    """Run a program, given as text, on `count` ranks; assert that each ends well and prints `good`.

    For tests of MPI itself: with its own sums and its own waiting.
    """
    printed = on_ranks(count, "-c", program, *arguments, timeout=timeout, **{**MPICH_SUMS, **variables})
    assert printed.count("good") == count, printed
