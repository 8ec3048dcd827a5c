"""Opening files where anything may lie: only a regular file is opened, and no more of it read than it can sensibly be.

Everything that ortflow finds in a run directory is opened through here. A FIFO would be waited for forever, a
device has effects, and a file of holes would fill the memory. What cannot be opened is an OSError that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

SMALL = 16 << 20
"""Bytes of the largest record that is one JSON document."""
LONGEST_LINE = 1 << 20
"""Bytes of the longest line of a record."""
CHUNK = 1 << 16

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; never waits. Raises OSError, for anything else with what it is."""
    try:
        _check(path, os.stat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        # Between the look and the opening another may have come there.
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    what = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
    code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.ENXIO
    raise OSError(code, f"is {what}, not a file", os.fspath(path))


def read_whole(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """The contents of a regular file of at most `limit` bytes; OSError if it is longer, or none."""
    with os.fdopen(open_regular(path), "rb") as file:
        # No more is asked for than there is: Python would take the memory first.
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= limit else b""
        if size > limit or len(data) > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit >> 20} MiB, the limit for this file", os.fspath(path))
        return data


def lines_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The whole lines of a file of any size, without their ends; what follows the last end is none.

    Raises OSError, where a line is longer than any of ours too.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) == LONGEST_LINE:
                raise OSError(errno.EINVAL, "has a line that is too long for a record", os.fspath(path))


def mend_torn_line(path: Path) -> None:
    """Cut off a last line that a power cut left without its end, so that the next one starts a line."""
    descriptor = open_regular(path, os.O_RDWR)
    try:
        size = end = os.fstat(descriptor).st_size
        while end and size - end < LONGEST_LINE:
            start = max(0, end - CHUNK)
            place = os.pread(descriptor, end - start, start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        if size - end < LONGEST_LINE and end != size:
            os.ftruncate(descriptor, end)
    finally:
        os.close(descriptor)
