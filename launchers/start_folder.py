"""The folder in which `python -m` is started, and the way back to the user's.

`-m` and `-c` search the current folder before Python's own library, so a `queue.py` in a run directory, or a `copy.py`
beside a run file, would be executed. CPython 3.11 has -P against it, 3.10 has nothing, and 3.13 imports `linecache`
before the first line of `-c`. Every process therefore starts in ROOT, where users have no modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from ortflow.manifests.local import absolute_entries

ROOT = "/"
PREVIOUS = "OLDPWD"
"""The variable in which a shell's `cd /` leaves the folder before."""


def leaving(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that starts in ROOT and returns to `folder`. Pure."""
    changes = {PREVIOUS: folder}
    if entries := environment.get("PYTHONPATH"):
        changes["PYTHONPATH"] = absolute_entries(entries, folder)
    return {**environment, **changes}


def go_back() -> None:
    """Return to the folder before ROOT, if this process started in ROOT: relative paths are relative to it."""
    if os.getcwd() == ROOT and os.environ.get(PREVIOUS):
        with suppress(OSError):
            os.chdir(os.environ[PREVIOUS])
