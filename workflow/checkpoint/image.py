"""The content of a rank's file at the time of a save, returned in pieces, in order.

The end of the file is copied first, into memory that is reused by every save. The part before it is read from the live
buffers, which must not change until it has been written. A small state is copied as a whole, and so is one on a GPU, if
the host has the room; of a large one in the host's memory there is never a second copy.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ortflow.workflow.checkpoint.tensors import PAGE, FileLayout
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.system.threads import start_or_call

if TYPE_CHECKING:
    from ortflow.workflow.device import Buffer
    from ortflow.workflow.device.shard import Shard

CHUNK = 8 << 20
"""Bytes per piece, large enough for the full speed of a disk."""
COPIED = 32 << 20
"""Bytes that are copied at a time: a step's loss may wait behind them on its way from a GPU."""


class Image:
    """The file of `layout`, over live buffers."""

    def __init__(self, layout: FileLayout, buffers: Mapping[str, Buffer | Shard], copying: Copying) -> None:
        self._layout, self._buffers = layout, buffers
        self._end = _pages(layout.size)
        self._split = _pages(max(0, layout.size - copying.kept))
        self._kept = _memory(self._end - self._split)
        self._piece = _memory(min(CHUNK, self._split))
        touch(self._piece)
        self._ready: Future[object] = Future()
        if copying.lock is None:
            # Here, so that no step waits for it.
            touch(self._kept)
            self._ready.set_result(None)
        else:
            # Seconds for tens of GB, and while a GPU computes most cores have nothing to do.
            start_or_call("checkpoint memory", partial(self._prepare, copying.lock))
        self.released = threading.Event()
        """Set while the buffers may change."""
        self.released.set()

    @property
    def copied(self) -> int:
        """Bytes of the copy."""
        return self._end - self._split

    def copy(self) -> None:
        """Copy the end; a small state may change afterwards. The first time, wait until its memory is ready."""
        self._ready.result()
        for start in range(self._split, self._end, COPIED):
            self._fill(self._kept, self._split, start, min(start + COPIED, self._end))
        if not self._split:
            self.released.set()

    def _prepare(self, lock: Callable[[mmap.mmap], object]) -> None:
        try:
            touch(self._kept)
            self._ready.set_result(lock(self._kept))
        except BaseException as error:  # noqa: BLE001 - `copy` raises it
            self._ready.set_exception(error)

    def pieces(self) -> Iterator[memoryview]:
        """The file in whole pages, with zeros after its end; each piece is valid until the next one. Call `copy`
        before.
        """
        for start in range(0, self._split, CHUNK):
            stop = min(start + CHUNK, self._split)
            self._fill(self._piece, start, start, stop)
            yield memoryview(self._piece)[: stop - start]
        self.released.set()
        tail = memoryview(self._kept)
        for start in range(0, len(tail), CHUNK):
            yield tail[start : start + CHUNK]

    def _fill(self, target: mmap.mmap, base: int, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the file to `target`, where its byte `base` is the first."""
        header = self._layout.header[start:stop]
        target[start - base : start - base + len(header)] = header
        for span in self._layout.spans:
            first, last = max(start, span.offset), min(stop, span.end)
            if first >= last:
                continue
            buffer = self._buffers[span.buffer]
            size = buffer.dtype.itemsize
            begin, count = span.start + (first - span.offset) // size, (last - first) // size
            into = np.frombuffer(target, buffer.dtype, count, first - base)
            buffer.slice(begin, begin + count).read(into)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _memory(size: int) -> mmap.mmap:
    """Page-aligned zeroed memory; one page if nothing is needed."""
    # Direct I/O needs memory that is aligned to blocks; numpy 2.4 aligns to 16 bytes.
    memory = mmap.mmap(-1, max(size, PAGE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap) -> None:
    """Let the kernel provide every page now."""
    np.frombuffer(memory, np.uint8)[::PAGE] = 0
