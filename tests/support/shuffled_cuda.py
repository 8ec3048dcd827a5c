"""A fake of CUDA's runtime whose streams run at random times, in any order that events and waits allow."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from fake_cuda import FakeCuda


class ShuffledCuda(FakeCuda):
    """Work is done when the host waits for it, or at a random earlier moment: a missing wait gives wrong values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random, self._lock = random.Random(seed), threading.RLock()
        self._queues: dict[int, deque[Callable[[], Any] | tuple[int, int]]] = defaultdict(deque)
        """Stream -> what it has yet to do; a pair is a wait for a record of an event."""
        self._asked: dict[int, int] = defaultdict(int)
        self._passed: dict[int, int] = defaultdict(int)
        """Event -> records that were queued, and that have passed."""

    def _work(self, stream: int, kind: int, do: Callable[[], Any], ends: tuple[int, int] = (0, 0)) -> None:
        if self.recording is not None and stream == 77:
            super()._work(stream, kind, do, ends)
        else:
            self._put(stream, do)

    def _put(self, stream: int, item: Callable[[], Any] | tuple[int, int]) -> None:
        with self._lock:
            self._queues[stream].append(item)
            for _ in range(self._random.randrange(4)):
                self._advance(self._random.choice(list(self._queues)))

    def _advance(self, stream: int) -> bool:
        """Do the next piece of a stream's work, unless it waits for an event."""
        queue = self._queues[stream]
        if not queue:
            return False
        item = queue[0]
        if isinstance(item, tuple):
            if self._passed[item[0]] < item[1]:
                return False
            queue.popleft()
            return True
        item()
        queue.popleft()
        return True

    def _until(self, done: Callable[[], bool]) -> None:
        with self._lock:
            while not done():
                streams = list(self._queues)
                self._random.shuffle(streams)
                assert any(self._advance(stream) for stream in streams), "nothing that was queued can end this wait"

    def cudaEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        with self._lock:
            self._asked[event.value] += 1
            number = self._asked[event.value]
        self._put(stream.value, lambda: self._passed.__setitem__(event.value, number))
        return super().cudaEventRecord(event, stream)

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        self._put(stream.value, (event.value, self._asked[event.value]))
        return super().cudaStreamWaitEvent(stream, event, flags)

    def cudaEventSynchronize(self, event: Any) -> int:  # noqa: N802
        number = self._asked[event.value]
        self._until(lambda: self._passed[event.value] >= number)
        return super().cudaEventSynchronize(event)

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        self._until(lambda: not self._queues[stream.value])
        return super().cudaStreamSynchronize(stream)

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        self._until(lambda: not any(self._queues.values()))
        return super().cudaFree(pointer)

    def cudaGraphLaunch(self, made: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append(("cudaGraphLaunch", made.value))
        for work in self.graphs[made.value]:
            self._put(stream.value, work.do)
        return self._code("cudaGraphLaunch")
