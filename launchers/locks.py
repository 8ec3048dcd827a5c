"""Who holds a run directory: advisory locks (flock) that the kernel lets go of when their holder dies.

The launcher holds RunDir.lock exclusively and writes who it is into it; every rank holds RunDir.ranks_lock shared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.files import open_regular, read_whole

PROBE = 0.3
"""Seconds for which taking a lock is tried: a reader that only asks holds it for an instant."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""A file system without locks, as some parallel ones are mounted: nothing can be held there."""


class HeldError(Exception):
    """Somebody else holds the lock; `holder` is what they wrote into it."""

    def __init__(self, holder: dict[str, str | int]) -> None:
        self.holder = holder
        super().__init__(f"held by process {holder.get('pid', '?')} on {holder.get('host', '?')}")


def hold(path: Path) -> int:
    """Take the lock and write who we are; returns the descriptor that holds it until it is closed or we die.

    A child that inherits the descriptor holds the lock too. Raises HeldError.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    if not _take(descriptor, PROBE, SYSTEM_CLOCK):
        holder = _holder(path)
        os.close(descriptor)
        raise HeldError(holder)
    sign(descriptor)
    return descriptor


def sign(descriptor: int) -> None:
    """Write who we are into a lock that we hold."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def holder_of(path: Path) -> dict[str, str | int] | None:
    """Who holds the lock; None if nobody does."""
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
    """Whether nobody holds the lock within so many seconds; the file is made if it is not there."""
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
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
