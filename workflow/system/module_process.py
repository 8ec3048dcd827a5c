"""Starts a module of ortflow as a process beside this one, so that it runs the same code and no stranger's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_module(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`; `options` are those of Popen. Raises OSError.

    It searches what this process searches.
    """
    # An empty entry stands for the current folder.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        # `-m` searches the current folder before Python's own library: a `queue.py` in a run directory would run.
        cwd="/",
        **options,
    )
