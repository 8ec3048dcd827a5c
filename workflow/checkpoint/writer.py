"""One rank's part of a save: its share of the state written, hashed and fsynced in the background.

The training loop has a `Writer`. `start` begins a save; `wait_copied` finishes the copy and must be called before any
buffer changes; writing continues during the next steps. The writer must not call MPI, which belongs to the main thread:
the loop polls, agrees with the other ranks, and rank 0 then commits or abandons the save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from ortflow.workflow.checkpoint.image import Image
from ortflow.workflow.checkpoint.manifest import FileRecord, finished
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import BufferSpec, file_layout, file_name
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.system.disk_space import is_full

if TYPE_CHECKING:
    from ortflow.workflow.device import Buffer
    from ortflow.workflow.device.shard import Shard

DTYPES = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "F16": "<f2", "U8": "|u1"}
"""numpy's types, by the format's names."""


@dataclass(frozen=True)
class Status:
    """State of a save. `failed` has a reason; `written` has the file's record."""

    state: Literal["idle", "writing", "written", "failed"]
    record: FileRecord | None = None
    reason: str = ""
    full: bool = False
    """Whether it failed because the disk was full."""
    seconds: float = 0.0
    """Seconds from `start` to the end of the fsync."""


def specs(buffers: Mapping[str, Buffer | Shard]) -> dict[str, BufferSpec]:
    """Type and length of each buffer, as in the manifest."""
    return {name: BufferSpec(_dtype_name(buffer.dtype), buffer.count) for name, buffer in buffers.items()}


class Writer:
    """Saves this rank's share of `buffers` repeatedly. Its memory is reused by later saves; see `Image`."""

    def __init__(
        self,
        store: CheckpointStore,
        buffers: Mapping[str, Buffer | Shard],
        *,
        rank: int,
        world_size: int,
        attempt: int,
        copying: Copying | None = None,
    ) -> None:
        copying = copying or Copying()
        self._store, self._attempt, self._duty = store, attempt, copying.duty
        self._name = file_name(rank)
        self._layout = file_layout(specs(buffers), rank, world_size)
        self._image = Image(self._layout, buffers, copying)
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._status, self._stall = Status("idle"), 0.0
        self._started = 0.0

    @property
    def size(self) -> int:
        """Bytes of this rank's file."""
        return self._layout.size

    @property
    def copied(self) -> int:
        """Bytes of memory for the copy."""
        return self._image.copied

    @property
    def stall_seconds(self) -> float:
        """Seconds that the caller waited for the copy in the last save."""
        return self._stall

    def start(self, step: int, *, urgent: bool = False) -> None:
        """Begin a save. The buffers must stay as they are until `wait_copied` has returned.

        An `urgent` save may use a whole core; any other uses little of one until a caller waits for it. If no thread
        can be started, the save is written before this returns.
        """
        if self._status.state == "writing":
            raise RuntimeError("a save is still in progress")
        self._started, self._stall, self._status = time.perf_counter(), 0.0, Status("writing")
        self._image.released.clear()
        if urgent:
            self._hurry.set()
        else:
            self._hurry.clear()
        self._thread = threading.Thread(target=self._save, args=(step,), name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the user's limit of threads is reached
            self._thread = None
            self._hurry.set()
            self._save(step)
            self._stall = self._seconds()

    def wait_copied(self) -> None:
        """Wait until the buffers may change; returns immediately if no save needs them."""
        if not self._image.released.is_set():
            before = time.perf_counter()
            self._image.released.wait()
            self._stall += time.perf_counter() - before

    def poll(self) -> Status:
        """State of the save; after `written` or `failed` the writer can start the next one."""
        return self._status

    def wait(self) -> Status:
        """Wait until the save is written or has failed, and write at full speed."""
        self._hurry.set()
        if self._thread is not None:
            self.wait_copied()
            self._thread.join()
        return self._status

    def _save(self, step: int) -> None:
        path: Path | None = None
        try:
            try:
                self._image.copy()
                path = self._store.begin(step, self._attempt) / self._name
                digest = write_file(path, self._image, self.size, self._hurry, self._duty)
                record = FileRecord(self._name, self.size, digest)
            finally:
                self._image.released.set()
        except Exception as error:  # noqa: BLE001 - whatever a device or a disk raises ends the save, not the run
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink()
            message = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            reason = f"{message} writing {path or self._name}"
            self._status = Status("failed", reason=reason, full=is_full(error), seconds=self._seconds())
        else:
            self._status = Status("written", record, seconds=self._seconds())

    def _seconds(self) -> float:
        return time.perf_counter() - self._started


def write_file(path: Path, image: Image, size: int, hurry: threading.Event, duty: float) -> str:
    """Write and fsync the first `size` bytes of an image; returns their hash.

    Once the buffers may change, and until `hurry` is set, pauses limit the use of a core to `duty`.
    """
    hashing, done = xxhash.xxh3_128(), 0
    # By direct I/O if the file system supports it: no second copy, and the data set stays in the page cache.
    descriptor = _open(path)
    try:
        wall, used = time.perf_counter(), time.thread_time()
        for piece in image.pieces():
            _write_all(descriptor, piece)
            hashing.update(piece[: size - done])
            done += len(piece)
            # A lower priority would have the same effect, but starves on a busy machine and cannot be raised again when
            # a signal makes the save urgent.
            if image.released.is_set() and not hurry.is_set():
                pause = (time.thread_time() - used) / duty - (time.perf_counter() - wall)
                hurry.wait(max(0.0, pause))
            wall, used = time.perf_counter(), time.thread_time()
        # The last direct write was a whole page.
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return finished(hashing)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        # EINVAL: the file system has no direct I/O (open(2)).
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        try:
            count = os.write(descriptor, data)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            direct = getattr(os, "O_DIRECT", 0)
            if error.errno != errno.EINVAL or not flags & direct:
                raise
            # Some file systems accept the flag and then reject the write, or unaligned lengths.
            # O_DIRECT is one of the flags that can be changed in an open file (fcntl(2)).
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
            continue
        data = data[count:]


def _dtype_name(dtype: np.dtype) -> str:
    for name, numpy_name in DTYPES.items():
        if np.dtype(numpy_name) == dtype:
            return name
    raise TypeError(f"a buffer of {dtype} cannot be saved")
