"""MPICH's shared memory: a file in /dev/shm that it removes only when all ranks leave in order.

Ranks take the name away as soon as all have mapped it, so that a kill leaves nothing (`forget`). One that is killed
before that leaves it to the launcher (`sweep`). Linux; elsewhere there is nothing to find.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
SETTLE = 0.2
"""Seconds in which a process that starts MPI maps what it has made."""
_MAPPED = re.compile(rb"/dev/shm/(mpich_shm_\w+)$", re.MULTILINE)


def forget() -> None:
    """Take away the names that this process has mapped; only when every rank of the machine has."""
    for name in _mapped("self"):
        with suppress(OSError):
            (FOLDER / name).unlink()


def sweep(since: float, folder: Path = FOLDER) -> list[str]:
    """Remove what ranks left that were killed while they connected; the names.

    That is what this user has made since a Unix time, and no process has mapped. Only when no rank is alive.
    """
    found = []
    for path in folder.glob("mpich_shm_*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= since:
                found.append(path.name)
    if not found:
        return []
    gone = _unmapped(found)
    if gone:
        # Another program of this user may have made one just now, and maps it in a moment.
        time.sleep(SETTLE)
        gone = _unmapped(gone)
    for name in gone:
        with suppress(OSError):
            (folder / name).unlink()
    return gone


def _unmapped(names: list[str]) -> list[str]:
    used = {name for process in os.listdir("/proc") if process.isdigit() for name in _mapped(process)}
    return [name for name in names if name not in used]


def _mapped(process: str) -> Iterator[str]:
    with suppress(OSError):
        yield from (name.decode() for name in _MAPPED.findall(Path("/proc", process, "maps").read_bytes()))
