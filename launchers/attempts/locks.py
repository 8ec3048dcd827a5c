"""Who holds a run directory: advisory locks (flock), which the kernel releases when their holder dies.

The launcher holds RunDir.lock exclusively and writes its host and process id into it; every rank holds
RunDir.ranks_lock shared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import open_regular, read_whole

PROBE = 0.3
"""Seconds for which a lock is tried: a reader that only tests it holds it for an instant."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks, as on some parallel file systems."""


class HeldError(Exception):
    """Another process holds the lock; `holder` is what it wrote into it."""

    def __init__(self, holder: dict[str, str | int]) -> None:
        self.holder = holder
        super().__init__(f"held by process {holder.get('pid', '?')} on {holder.get('host', '?')}")


def hold(path: Path) -> int:
    """Take a lock and write host and process id into it.

    Parameters
    ----------
    path
        The lock file; made if it does not exist.

    Returns
    -------
    int
        The descriptor that holds the lock until it is closed or the process ends. A child that inherits it holds the
        lock too.

    Raises
    ------
    HeldError
        Another process holds it.
    """
    # For writing: NFS emulates flock by locks of fcntl, of which an exclusive one needs that (flock(2)).
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    if not _take(descriptor, PROBE, SYSTEM_CLOCK):
        holder = _holder(path)
        os.close(descriptor)
        raise HeldError(holder)
    try:
        sign(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return descriptor


def sign(descriptor: int) -> None:
    """Write host and process id into a lock that this process holds."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def holder_of(path: Path) -> dict[str, str | int] | None:
    """What the holder of a lock wrote into it; None if it is free."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return None


def wait_free(path: Path, seconds: float, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Wait until a lock is free.

    Parameters
    ----------
    path
        The lock file; made if it does not exist.
    seconds
        The longest wait; 0 tests once.
    clock
        The clock of the wait.

    Returns
    -------
    bool
        Whether the lock is free.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        return _take(descriptor, seconds, clock)
    finally:
        os.close(descriptor)


def _take(descriptor: int, seconds: float, clock: Clock) -> bool:
    end = clock.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() >= end:
                return False
            clock.sleep(0.02)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return True
        else:
            return True


def _holder(path: Path) -> dict[str, str | int]:
    try:
        holder = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}
