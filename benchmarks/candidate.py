"""Measures one candidate of a benchmark in processes of its own, so that none shares its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Failed(Exception):
    """A candidate without a result; the message is the reason."""


def measured(program: str, arguments: Sequence[str], ranks: int, limit: float) -> dict[str, Any]:
    """Run a program under mpirun of the environment's MPI.

    Parameters
    ----------
    program
        Path of the program, which all ranks run.
    arguments
        Its arguments.
    ranks
        Their number.
    limit
        Seconds that they may take.

    Returns
    -------
    dict
        The last line that rank 0 prints, which is JSON.

    Raises
    ------
    Failed
        If they do not end in time, or not with exit code 0.
    """
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    command = ["mpirun", "-n", str(ranks), sys.executable, program, *arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done within {limit:g} s") from None
    if done.returncode:
        raise Failed(f"ended with exit code {done.returncode}\n{done.stdout[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def leave(barrier: Callable[[], object]) -> None:
    """End this rank at once: what PyTorch has compiled may still hold NCCL."""
    barrier()
    sys.stdout.flush()
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None:
        # Without this, Open MPI takes the end for an abort.
        mpi.Finalize()
    os._exit(0)
