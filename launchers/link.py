"""Measures how fast two ranks of this machine exchange, for `ortflow plan`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ortflow.launchers.interpreter import locate
from ortflow.launchers.mpi import find_mpi
from ortflow.manifests.local import command, environment, settings
from ortflow.workflow.spec.run import RunSpec

LIMIT = 60.0
"""Seconds until the measurement is given up."""
PROGRAM = "ortflow.workflow.planning.link"


def measure_link(spec: RunSpec) -> tuple[float, float] | None:
    """Bytes per second and seconds of an empty message between two ranks; None if they cannot be started here."""
    two = spec.resources.model_copy(update={"nodes": 1, "ranks_per_node": 2})
    spec = spec.model_copy(update={"resources": two})
    python = locate(spec.resources.python)
    mpi = find_mpi(python, spec.backends.local.mpi)
    if mpi is None:
        return None
    with TemporaryDirectory(prefix="ortflow-link-") as folder:
        variables = {**settings(spec, Path(folder), 0, mpi), "OMP_NUM_THREADS": "1"}
        words = [*command(spec, Path(folder), python, mpi)[:-2], PROGRAM]
        try:
            done = subprocess.run(
                words, env=environment(variables, os.environ, os.getcwd()), stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True, timeout=LIMIT, check=False, cwd=folder, errors="replace",
            )  # fmt: skip
            # Hydra prints exit codes behind it.
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            result = json.loads(lines[0])
            return float(result["bandwidth"]), float(result["latency"])
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError, RecursionError):
            return None
