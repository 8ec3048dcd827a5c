"""The folder and the file system that a path is on. Read only; used by `ortflow doctor`."""

from __future__ import annotations

import os
from pathlib import Path


def existing(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that holds a path; empty if unknown."""
    best, kind = "", ""
    try:
        rows = [row.split() for row in mounts.read_text().splitlines()]
    except OSError:
        return kind
    real_path = os.path.realpath(path)
    for row in rows:
        # The kernel writes a blank in a path as \040 (fstab(5)).
        point = row[1].replace("\\040", " ")
        # Of two mounts on the same folder the later one is visible.
        if (real_path == point or real_path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, row[2]
    return kind
