"""A lock on an entry of a cache folder, which is removed with its holder. Called by those that build entries."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a lock; false where the file system has none."""
    while True:
        with path.open("a") as file:
            try:
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
