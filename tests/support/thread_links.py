"""Messages between fake GPUs of ranks that are threads, on streams that wait for each other as a GPU's do.

A message is copied when both ranks have queued it, so that memory that was changed too early shows. A stream that waits
for an event waits for the messages before it; the fake's host then waits, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np
from fake_cuda import FakeCuda
from thread_nccl import ThreadNccl, array_at
from thread_wire import PATIENCE


class _Message:
    """A send and a receive that meet."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[int, int]] = {}
        self.done = threading.Event()

    def meet(self) -> None:
        if len(self.ends) == 2:
            (source, size), (target, room) = self.ends["ncclSend"], self.ends["ncclRecv"]
            assert size == room, f"{size} bytes are sent, and {room} received"
            array_at(target, room, np.uint8)[:] = array_at(source, size, np.uint8)
            self.done.set()

    def wait(self) -> None:
        if not self.done.wait(PATIENCE):
            raise TimeoutError(f"only {list(self.ends)} of a message")


class StreamedCuda(FakeCuda):
    """A GPU whose streams may wait for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: dict[int, list[_Message]] = defaultdict(list)
        self._before: dict[int, list[_Message]] = {}
        self.stuck: list[str] = []
        """Calls that would have waited for messages in progress."""

    def cudaEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self._before[event.value] = list(self.under_way[stream.value])
        return super().cudaEventRecord(event, stream)

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        for message in self._before[event.value]:
            message.wait()
        return super().cudaStreamWaitEvent(stream, event, flags)

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        self._waits_for_messages("cudaFree")
        return super().cudaFree(pointer)

    def cudaFreeHost(self, pointer: Any) -> int:  # noqa: N802
        self._waits_for_messages("cudaFreeHost")
        return super().cudaFreeHost(pointer)

    def _waits_for_messages(self, name: str) -> None:
        """A GPU frees memory only when it is idle, so that two ranks would wait for each other for ever."""
        if any(not message.done.is_set() for found in self.under_way.values() for message in found):
            self.stuck.append(name)

    def cudaEventQuery(self, event: Any) -> int:  # noqa: N802
        return 0 if all(message.done.is_set() for message in self._before[event.value]) else 600


class LinkedNccl(ThreadNccl):
    """With messages. Each thread names its GPU first."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[Any, list[_Message]] = defaultdict(list)
        self._places: dict[Any, int] = defaultdict(int)
        self.sent = 0

    def here(self, cuda: StreamedCuda) -> StreamedCuda:
        """Use a GPU in this thread."""
        self._of_thread.cuda = cuda
        return cuda

    def ncclSend(self, *arguments: Any) -> int:  # noqa: N802
        return self._message("ncclSend", *arguments)

    def ncclRecv(self, *arguments: Any) -> int:  # noqa: N802
        return self._message("ncclRecv", *arguments)

    def _message(self, side: str, place: Any, count: Any, kind: int, peer: int, world: Any, stream: Any) -> int:
        assert kind == 1, "counted in bytes"
        meeting, rank, ranks = self._worlds[world.value]
        assert peer != rank
        assert 0 <= peer < ranks
        ends = (rank, peer) if side == "ncclSend" else (peer, rank)
        with self._lock:
            number = self._places[meeting, ends, side]
            self._places[meeting, ends, side] += 1
            found = self._messages[meeting, ends]
            while len(found) <= number:
                found.append(_Message())
            message = found[number]
            message.ends[side] = place.value, count.value
            message.meet()
            self.sent += side == "ncclSend"
        self._of_thread.cuda.under_way[stream.value].append(message)
        return 0
