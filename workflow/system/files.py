"""Opens files at untrusted paths: only regular files, and only up to a sensible size.

Everything that ortflow finds in a run directory is opened here. Opening a FIFO would block forever, a device has side
effects, and a sparse file would fill the memory. Failures raise OSError with the file's name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

SMALL = 16 << 20
"""Largest size in bytes of a record that is one JSON document."""
LONGEST_LINE = 1 << 20
"""Longest line of a record, in bytes."""
CHUNK = 1 << 16

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def free_name(path: Path) -> Path:
    """The first of NAME.1, NAME.2, … beside `path` that does not exist, not even as a broken link."""
    number = 1
    while os.path.lexists(name := path.with_name(f"{path.name}.{number}")):
        number += 1
    return name


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; never blocks. Raises OSError, which says what else the path is."""
    try:
        _check(path, os.stat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # A FIFO would wait for a writer, and a terminal would become that of this process (open(2), O_NOCTTY).
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    try:
        # The file may have been replaced between the check and the opening.
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
    code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.ENXIO
    raise OSError(code, f"is {kind}, not a file", os.fspath(path))


def read_whole(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """The contents of a regular file of at most `limit` bytes. Raises OSError if it is longer or not regular."""
    with os.fdopen(open_regular(path), "rb") as file:
        # Read no more than the file's size: Python would allocate the limit first.
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= limit else b""
        if size > limit or len(data) > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit >> 20} MiB, the limit for this file", os.fspath(path))
        return data


def lines_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The complete lines of a file of any size, without newlines; an incomplete last line is ignored.

    Raises OSError, also if a line is longer than LINE_LIMIT.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) == LONGEST_LINE:
                raise OSError(errno.EINVAL, "has a line that is too long for a record", os.fspath(path))


def mend_torn_line(path: Path) -> None:
    """Remove an incomplete last line, left by a power failure, so that the next write starts a line."""
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
