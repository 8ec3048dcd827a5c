"""The lock on an entry of a cache folder, and the folder in which it is built. Called by those that build entries."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_FORGOTTEN = 7 * 86400.0
"""Seconds after which a build that was killed is removed."""
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.")
"""How the names of folders begin in which entries are built: with the entry's key."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a lock; false where the file system has none."""
    while True:
        with path.open("a") as file:
            try:
                # The kernel drops this lock with the open file, however the process ends.
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a network file system without locks
                yield False
                return
            if not _is_at(path, file.fileno()):  # its last holder has removed it, and others may hold a new one
                continue
            try:
                yield True
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def partial_folder(folder: Path, key: str, locked: bool) -> Path:
    """The folder in which an entry is built; it may hold what a process that was killed has built.

    Removes those of builds that nobody has continued for days.
    """
    for old in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if _PARTIAL.match(old.name) and old.is_dir() and time.time() - old.stat().st_mtime > _FORGOTTEN:
                shutil.rmtree(old, ignore_errors=True)
    if not locked:
        return Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
    partial = folder / f".{key}.{socket.gethostname()}"
    partial.mkdir(mode=0o700, exist_ok=True)
    return partial
