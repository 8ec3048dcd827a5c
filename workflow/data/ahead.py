"""Read-ahead: one background thread prepares the next batches while the current one is used.

A consumer that asks for the next item quickly gets it from its own thread, since a handover would cost more. The
background thread ends with the iterator: when it is closed, exhausted, failed or garbage-collected, or at the
interpreter's exit. Its exceptions are raised at the consumer's `next`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

WORTHWHILE_SECONDS = 5e-4
"""Seconds between two items above which reading in the background is faster, despite the cost of waking a thread."""


class ReadAhead(Generic[Item]):
    """Iterates over the items of `groups`, preparing up to `depth` groups in advance.

    Used as a context manager, it stops the thread on exit.

    Parameters
    ----------
    groups
        Groups of items, each read as a whole.
    depth
        Number of groups to prepare.
    worthwhile
        Seconds between two items above which the next ones are read in the background.
    """

    def __init__(self, groups: Iterable[Sequence[Item]], depth: int, worthwhile: float = WORTHWHILE_SECONDS) -> None:
        self._groups = iter(groups)
        self._depth, self._worthwhile = depth, worthwhile
        self._ready: deque[Item] = deque()
        self._left = time.perf_counter()
        # An idle executor thread ends with the interpreter, and futures carry exceptions.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ortflow-data")
        self._pending: deque[Future[Sequence[Item]]] = deque()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self._ready:
            self._read()
        if not self._ready:
            self.close()
            raise StopIteration
        self._left = time.perf_counter()
        return self._ready.popleft()

    def _read(self) -> None:
        nothing: Sequence[Item] = ()
        slow = time.perf_counter() - self._left > self._worthwhile
        # A generator runs in one thread at a time: this is only reached when no group is being read.
        group = self._pending.popleft().result() if self._pending else next(self._groups, nothing)
        self._ready.extend(group)
        while slow and group and len(self._pending) < self._depth:
            # CPython queues the call before it starts a thread for it: after a failure, another submit would run both.
            try:
                self._pending.append(self._executor.submit(next, self._groups, nothing))
            except RuntimeError:  # no thread can be started: the reader reads
                self._worthwhile = math.inf
                return

    def close(self) -> None:
        """Stop the thread after the group it is reading; further iteration ends immediately."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._groups = iter(())
        self._pending.clear()
        self._ready.clear()

    def __enter__(self) -> ReadAhead[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
