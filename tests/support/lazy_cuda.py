"""A fake GPU whose further streams work only when the first one waits for them, and NCCL on such GPUs.

Work that is queued on another stream than the first one is done as late as the order of the streams permits. What the
first stream reads without waiting, or changes while it is still needed, then shows as a wrong number. With `eager`, it
is done as early as possible: when it is queued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda import KERNEL, FakeCuda
from onnx import TensorProto
from thread_nccl import KINDS, ThreadNccl, array_at

from ortflow.workflow.cuda import shards
from ortflow.workflow.trainer.queued_exchange import QueuedExchange

FIRST = 77
KINDS.setdefault(1, np.uint8)


class LazyCuda(FakeCuda):
    """See the module. `deferred` counts what was done later than it was queued."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self.eager, self.deferred = eager, 0
        self._waiting: dict[int, list[Callable[[], Any]]] = defaultdict(list)
        self._done: dict[int, int] = defaultdict(int)
        self._marks: dict[int, tuple[int, int]] = {}
        self.order: list[tuple[str, int]] = []
        """What was queued: marks and waits with their events and streams, and other work with its stream."""

    def defer(self, stream: int, do: Callable[[], Any]) -> None:
        """Queue work on a stream."""
        self.order.append(("work", stream))
        if self.eager or stream == FIRST:
            do()
        else:
            self._waiting[stream].append(do)

    def _work(self, stream: int, kind: int, do: Callable[[], Any], ends: tuple[int, int] = (0, 0)) -> None:
        if stream == FIRST:
            super()._work(stream, kind, do, ends)
        else:
            self.defer(stream, do)

    def cudaEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self._work(FIRST, KERNEL, lambda place=event.value, on=stream.value: self._mark(place, on))
        return super().cudaEventRecord(event, stream)

    def _mark(self, event: int, stream: int) -> None:
        self.order.append((f"mark {event}", stream))
        self._marks[event] = stream, self._done[stream] + len(self._waiting[stream])

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        self._work(FIRST, KERNEL, lambda place=event.value, on=stream.value: self._after(on, place))
        return super().cudaStreamWaitEvent(stream, event, flags)

    def _after(self, stream: int, event: int) -> None:
        self.order.append((f"wait {event}", stream))
        self._until(event)

    def _until(self, event: int) -> None:
        """Do what is before a mark; one that was never made is passed."""
        stream, until = self._marks.get(event, (FIRST, 0))
        while self._waiting[stream] and self._done[stream] < until:
            self._next(stream)

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        while self._waiting[stream.value]:
            self._next(stream.value)
        return super().cudaStreamSynchronize(stream)

    def cudaEventSynchronize(self, event: Any) -> int:  # noqa: N802
        self._until(event.value)
        return super().cudaEventSynchronize(event)

    def _next(self, stream: int) -> None:
        self._done[stream] += 1
        self.deferred += 1
        self._waiting[stream].pop(0)()

    def cudaEventQuery(self, event: Any) -> int:  # noqa: N802
        stream, until = self._marks.get(event.value, (FIRST, 0))
        return 600 if self._waiting[stream] and self._done[stream] < until else 0

    @property
    def left(self) -> int:
        """What nobody has waited for."""
        return sum(map(len, self._waiting.values()))


class LazyNccl(ThreadNccl):
    """The library on these GPUs. Each thread names its own first."""

    def here(self, cuda: LazyCuda) -> None:
        """Use a GPU in this thread."""
        self._of_thread.cuda = cuda

    def _collective(self, name: str, arguments: Any) -> None:
        collective = super()._collective
        stream = arguments[-1].value
        if stream == FIRST:
            collective(name, arguments)
        else:
            self._of_thread.cuda.defer(stream, lambda: collective(name, arguments))


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute on these GPUs what kernels would."""

    def rounded(operators: Any, runtime: Any, stream: int, target: int, start: int, count: int, kind: int) -> None:
        to = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}[kind]  # type: ignore[index]

        def do() -> None:
            array_at(target, count, to)[:] = array_at(start, count, np.float32)

        runtime.library.defer(stream, do)

    def added(operators: Any, stream: int, target: int, more: int, count: int) -> None:
        def do() -> None:
            array_at(target, count, np.float32)[:] += array_at(more, count, np.float32)

        operators.cuda.defer(stream, do)

    begin = QueuedExchange.begin_pass

    def begun(self: QueuedExchange, *, fresh: bool) -> None:
        # The fake runs the nodes of a captured graph when it is launched.
        self._device.here().library.kernel(lambda: begin(self, fresh=fresh))

    monkeypatch.setattr(shards, "rounded", rounded)
    monkeypatch.setattr(shards, "added", added)
    monkeypatch.setattr(QueuedExchange, "begin_pass", begun)
