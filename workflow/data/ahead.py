"""Reading ahead: the next batches are made in one background thread while the current one is used.

Called around the batches. Whoever asks again at once gets the next batches made in the asking thread: handing them
over would cost more than making them. The background thread ends with the iterator: closed, exhausted, failed,
forgotten, or at the interpreter's exit; what it raises is raised at the reader's `next`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

_WORTHWHILE_SECONDS = 5e-4
"""Time a caller takes between two items from which on reading in the background repays waking a thread."""


class ReadAhead(Generic[Item]):
    """Iterates the items of `groups`, with up to `depth` groups made in advance.

    A caller that takes longer than `worthwhile` seconds between two items has the next ones read in the background.
    A context manager: leaving it stops the thread.
    """

    def __init__(self, groups: Iterable[Sequence[Item]], depth: int, worthwhile: float = _WORTHWHILE_SECONDS) -> None:
        self._groups = iter(groups)
        self._depth, self._worthwhile = depth, worthwhile
        self._ready: deque[Item] = deque()
        self._left = time.perf_counter()
        # An executor's idle thread needs no word to end with the interpreter, and its futures carry exceptions.
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
        # The generator runs in one thread at a time: here only when none of its groups is asked for.
        group = self._pending.popleft().result() if self._pending else next(self._groups, nothing)
        self._ready.extend(group)
        while slow and group and len(self._pending) < self._depth:
            self._pending.append(self._executor.submit(next, self._groups, nothing))

    def close(self) -> None:
        """Stop the thread, waiting for the group it is at; iterating further ends immediately."""
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
