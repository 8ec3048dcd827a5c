"""Watch NCCL while the rank waits: an all-reduce that fails or hangs ends with an error.

NCCL's kernels wait on the GPU for the other ranks, and a rank waits for its GPU. A thread checks the communicator and
the oldest all-reduce in progress. If either fails, it aborts the communicator. This ends the kernels, and the rank's
wait ends with the reason.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import CudaError

PERIOD = 0.5
"""Seconds between two checks."""


class Watch:
    """Watches one communicator in a thread.

    `fault` returns the error that NCCL has found, empty if there is none; `end` aborts what is in progress. An
    all-reduce that takes longer than `limit` seconds counts as hung; None disables the limit.
    """

    def __init__(
        self,
        device: CudaDevice,
        fault: Callable[[], str],
        end: Callable[[], None],
        limit: float | None,
        period: float,
    ) -> None:
        self._device, self._fault, self._end, self._limit, self._period = device, fault, end, limit, period
        self._under_way: collections.deque[tuple[int, float]] = collections.deque()
        self._free: list[int] = []
        self._calling: float | None = None
        self._done = threading.Event()
        self.trouble = ""
        """Why the communicator was aborted; empty if it was not."""
        self._thread = threading.Thread(target=self._look, name="nccl", daemon=True)
        self._thread.start()

    def began(self, stream: int | None = None) -> None:
        """Called when an all-reduce or a message has been queued, on the device's stream or another one."""
        runtime = self._device.here()
        event = self._free.pop() if self._free else runtime.event()
        runtime.record(event, self._device.stream if stream is None else stream)
        self._under_way.append((event, time.monotonic()))

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """While an all-reduce is being queued: the first of its kind connects the ranks, and waits for them."""
        self._calling = time.monotonic()
        try:
            yield
        finally:
            self._calling = None

    def close(self) -> None:
        """Called when no all-reduce is in progress."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(self._period):
            try:
                self.trouble = self._found()
            except CudaError as error:
                self.trouble = f"the GPU failed in an all-reduce: {error.message}"
            if self.trouble:
                self._end()
                return

    def _found(self) -> str:
        runtime = self._device.here()
        while self._under_way and runtime.passed(self._under_way[0][0]):
            self._free.append(self._under_way.popleft()[0])
        if fault := self._fault():
            return fault
        begun = self._under_way[0][1] if self._under_way else self._calling
        if self._limit is not None and begun is not None and time.monotonic() - begun > self._limit:
            return (
                f"an all-reduce over the ranks' GPUs did not finish within {self._limit:g} s (restart.hung_seconds): "
                "another rank has ended or is stuck; see the logs of the other ranks"
            )
        return ""
