"""A user's cache in which no check of a gradient is remembered."""

from __future__ import annotations

import shutil
from pathlib import Path

from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.system.cache_folders import cache_folders


def cache_without_gradients(folder: Path) -> Path:
    """Make a cache, for XDG_CACHE_HOME, that has the kernels and the runtimes' checks of the user's own.

    A run with an empty cache first compiles the kernels and checks ONNX Runtime, for ten seconds of processor time.
    """
    find_library()
    for purpose in ("kernels", "runtimes"):
        own = next(cache_folders(purpose), None)
        if own is not None:
            shutil.copytree(own, folder / "ortflow" / purpose)
    (folder / "ortflow").chmod(0o700)
    return folder
