"""Finds the mpirun that starts the ranks: first beside their interpreter, because mpi4py loads its library first."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from ortflow.manifests.local import Mpi, MpiKind

NAMES = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi")


_LIBRARIES: tuple[tuple[str, MpiKind], ...] = (("libmpi.so.12*", "mpich"), ("libmpi.so.40*", "openmpi"))
"""File names that identify the two MPI ABIs."""


def find_mpi(
    python: str, setting: Literal["auto", "mpich", "openmpi"], search: str | None = None, *, trusts: bool = True
) -> Mpi | None:
    """The first mpirun of the wanted kind, beside the ranks' interpreter or on the PATH (`search` if given).

    Its output tells the kind. Without `trusts`, one beside the interpreter is not started: the library there tells it.
    """
    for folder, starts in ((str(Path(python).parent), trusts), (search or os.environ.get("PATH", os.defpath), True)):
        for name in NAMES:
            executable = shutil.which(name, path=folder)
            kind = (kind_of(executable) if starts else library_beside(python)) if executable else None
            if executable and kind and setting in ("auto", kind):
                return Mpi(kind, os.path.abspath(executable))
    return None


def library_beside(python: str) -> MpiKind | None:
    """The kind of the MPI library where mpi4py looks first: in lib/ of the interpreter's environment."""
    folder = Path(python).parent.parent / "lib"
    return next((kind for pattern, kind in _LIBRARIES if any(folder.glob(pattern))), None)


def kind_of(executable: str) -> MpiKind | None:
    """The kind that an mpirun reports; Intel MPI and MVAPICH start processes with Hydra as MPICH does."""
    try:
        answer = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = answer.stdout + answer.stderr
    if "HYDRA" in output or "Intel(R) MPI" in output:
        return "mpich"
    return "openmpi" if "Open MPI" in output or "OpenRTE" in output else None
