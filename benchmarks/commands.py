"""Whole commands, for the benchmarks that measure them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time

ORTFLOW = [sys.executable, "-m", "ortflow"]


@functools.cache
def _environment() -> dict[str, str]:
    """As after an installation: modules are compiled, in a folder that goes with these programs."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), f"ortflow-bench-{os.getuid()}")}


def run(*command: str) -> tuple[str, float]:
    """Output and seconds of a command. Raises SystemExit if it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=_environment()
    )
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout, seconds
