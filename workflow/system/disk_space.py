"""Full disks: recognised from errors, reported in one sentence, and waited for.

Nothing can be written to a full disk, so the required space is recorded in a file that already has its block: the
heartbeat, which `ortflow status` reads. Written by rank 0 while ranks run, and by the supervisor between two attempts.
File systems that never write in place (ZFS, btrfs) may reject that too; then the file's sticky bit is the notice.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import open_regular, read_whole

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The file system has no free blocks, or the user's quota is exceeded."""
BLOCK = 2048
"""Bytes of the notice, allocated while there is space."""
RECORDS = 64 << 10
"""Bytes that records and logs need in addition to the requested ones."""
POLL_PERIOD = 1.0
"""Seconds between two checks for free space."""


class OutOfDisk(OrtflowError):
    """There is no room for `needed_bytes` at `path`; retry when there is."""

    def __init__(self, path: Path, needed_bytes: int) -> None:
        self.path, self.needed_bytes = path, needed_bytes
        super().__init__(sentence(path, needed_bytes))

    def __reduce__(self) -> tuple[type[OutOfDisk], tuple[Path, int]]:
        """Pickle the arguments: ranks send this error to each other."""
        return type(self), (self.path, self.needed_bytes)


def sentence(path: Path | str, needed_bytes: int) -> str:
    """The message. Pure."""
    return f"out of disk on {path}, {max(needed_bytes, 100_000) / 1e6:,.1f} MB needed"


def is_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is a full disk or quota. Pure."""
    return any(
        isinstance(cause, OutOfDisk) or (isinstance(cause, OSError) and cause.errno in FULL) for cause in _chain(error)
    )


def is_too_large(error: BaseException) -> bool:
    """Whether a write reached the largest size of a file: no space that is freed lets it succeed. Pure."""
    # CPython ignores SIGXFSZ, by which the kernel would end the process.
    return any(isinstance(cause, OSError) and cause.errno == errno.EFBIG for cause in _chain(error))


def too_large(path: Path | str, size: int | None = None) -> UserError:
    """The error of a file that is larger than this process may write; `size` in bytes, if it is known."""
    limit = file_size_limit()
    bound = "the largest file of the file system" if limit is None else f"the limit of a file's size, {limit} bytes"
    problem = f"reaches {bound}" if size is None else f"has {size} bytes, and {bound}, does not allow it"
    return UserError(problem, where=str(path), fix="raise the limit (`ulimit -f`), or use another file system")


def file_size_limit() -> int | None:
    """Largest size of a file that this process may write, in bytes; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def short_write(path: Path, size: int) -> OSError:
    """The error behind a write that was cut short in a file that would have had `size` bytes."""
    limit = file_size_limit()
    code = errno.EFBIG if limit is not None and size > limit else errno.ENOSPC
    return OSError(code, os.strerror(code), str(path))


def out_of_disk(error: BaseException, needed_bytes: int = RECORDS, default: Path | str = "?") -> OutOfDisk:
    """The OutOfDisk for such an error. Pure."""
    for cause in _chain(error):
        if isinstance(cause, OutOfDisk):
            return cause
        if isinstance(cause, OSError) and cause.errno in FULL and isinstance(cause.filename, str):
            return OutOfDisk(Path(cause.filename), needed_bytes)
    return OutOfDisk(Path(default), needed_bytes)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, which may include itself."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return chain


def has_room(path: Path, needed_bytes: int) -> bool:
    """Whether `needed_bytes` can be written at a path, as far as can be determined. Leaves no file.

    The file system reports its free space. A quota shows only when space is allocated: all of it for a moment if the
    file system can reserve space, else a little.
    """
    folder = _folder(path)
    trial = folder / f".room.{os.getpid():08d}"
    try:
        if shutil.disk_usage(folder).free < needed_bytes:
            return False
        descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        return error.errno not in FULL
    try:
        os.unlink(trial)  # an unnamed file is removed by a kill, too
        _reserve(descriptor, needed_bytes)
        data = os.urandom(min(needed_bytes, RECORDS))
        while data:
            data = data[os.write(descriptor, data) :]
        # Some file systems, NFS among them, reserve no space before (write(2)).
        os.fsync(descriptor)
    except OSError as error:
        return error.errno not in FULL
    finally:
        os.close(descriptor)
    return True


def _reserve(descriptor: int, size: int) -> None:
    """Allocate a file's blocks, if the file system can do so without writing them. Raises OSError if it refuses."""
    # posix_fallocate would write a byte into every block instead.
    if (fallocate := _fallocate()) is not None and size > 0 and fallocate(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code in FULL:
            raise OSError(code, os.strerror(code))


@functools.cache
def _fallocate() -> Any:
    """fallocate of the C library; None if there is none."""
    # Python's os has posix_fallocate alone.
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _folder(path: Path) -> Path:
    """The nearest existing folder."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


class Notice:
    """The space that a run lacks, recorded in the block of its heartbeat; never raises.

    The writer may be dead when space is freed, so a reader checks the disk, too. It can only do so if the file system
    itself was full: a quota shows only on a write, and another machine's disk not at all.
    """

    def __init__(self, heartbeat: Path) -> None:
        self._path = heartbeat
        self._reported: str | None = None

    def report(self, lack: OutOfDisk, *, fatal: bool = False) -> None:
        """Write the notice, which `status` reports. `fatal`: this rank fails because of it, and may be unable to record
        that.
        """
        content = {
            "path": str(lack.path)[-1000:], "needed": lack.needed_bytes, "short": self._is_short(lack), "fatal": fatal,
        }  # fmt: skip
        text = json.dumps(content)
        if text != self._reported and self._write(text):
            self._reported = text

    def clear(self) -> None:
        """Remove the notice, and keep its block allocated."""
        if self._reported != "" and self._write(""):
            self._reported = ""

    def _write(self, text: str) -> bool:
        with suppress(OSError):
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
            try:
                return _put(descriptor, text)
            finally:
                os.close(descriptor)
        return False

    def read(self) -> OutOfDisk | None:
        """The missing space; None if there is no notice, or the disk has space again."""
        lack, short, _ = self._load()
        return None if lack is None or (short and self._is_short(lack) is False) else lack

    def fatal(self) -> OutOfDisk | None:
        """The missing space for which a rank has failed, even if the disk has space now."""
        lack, _, fatal = self._load()
        return lack if fatal else None

    def last(self) -> OutOfDisk | None:
        """The missing space when the notice was written, even if the disk has space now."""
        return self._load()[0]

    def _load(self) -> tuple[OutOfDisk | None, bool, bool]:
        try:
            text = read_whole(self._path, 2 * BLOCK)
            if not text.strip() and self._path.lstat().st_mode & stat.S_ISVTX:
                return OutOfDisk(self._path.parent, RECORDS), False, False
            content = json.loads(text)
            lack = OutOfDisk(Path(content["path"]), int(content["needed"]))
            return lack, content.get("short") is True, content.get("fatal") is True
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None, False, False

    def _is_short(self, lack: OutOfDisk) -> bool | None:
        """Whether the file system has less than is needed; None if this machine cannot access it."""
        try:
            if not lack.path.resolve().is_relative_to(self._path.parent.resolve()):
                return None
            return shutil.disk_usage(_folder(lack.path)).free < lack.needed_bytes
        except (OSError, RuntimeError):  # cyclic links
            return None


def _put(descriptor: int, text: str) -> bool:
    """Write a notice; if even its own block is refused, set the sticky bit. Raises OSError."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if not text and mode & stat.S_ISVTX:
        os.fchmod(descriptor, mode & ~stat.S_ISVTX)
    try:
        return os.pwrite(descriptor, text.encode().ljust(BLOCK), 0) == BLOCK
    except OSError as error:
        if text and is_full(error):
            os.fchmod(descriptor, mode | stat.S_ISVTX)
        raise


def wait_for_room(
    lack: OutOfDisk, notice: Notice, seconds: float, leave: Callable[[], object], clock: Clock = SYSTEM_CLOCK
) -> bool:
    """Wait until there is space, at most `seconds`; returns whether there is. Ends early if `leave` returns True."""
    notice.report(lack)
    end = clock.monotonic() + seconds
    while not leave() and clock.monotonic() < end:
        if has_room(lack.path, lack.needed_bytes):
            notice.clear()
            return True
        clock.sleep(0.2)
    return False
