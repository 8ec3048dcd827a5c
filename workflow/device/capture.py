"""Work that is queued repeatedly on the same memory: captured as a CUDA graph, then launched by one call.

Used by the trainer on GPUs. Work that cannot be captured is queued piece by piece, and one log line says why.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from ortflow.workflow.device.cudart import CudaError, Runtime
from ortflow.workflow.errors import OrtflowError

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

WARM = 3
"""Runs before the capture, in which memory grows, kernels are loaded and algorithms are selected."""
COPY, HOST = 1, 3
"""cudaGraphNodeType: a memory copy, a host function call."""


class NotCaptured(Exception):
    """Raised if work cannot be captured; the message says why."""


class Repeated:
    """Work that `queue` puts on the device's stream; `name` is its name in the log.

    `queue` must not wait for the GPU or depend on anything but the contents of the same memory.
    """

    def __init__(
        self,
        device: CudaDevice,
        name: str,
        queue: Callable[[], None],
        note: Callable[[str], None],
        obstacle: str = "",
        *,
        wanted: bool = True,
    ) -> None:
        self._device, self._name, self._queue, self._note = device, name, queue, note
        self._seen: Hashable = None
        self._times = 0
        self._graph = self._made = 0
        self.obstacle: str | None = obstacle or None if wanted else "nobody wants it"
        """Why it is not captured; None if it is, or may be."""
        self._to_say = obstacle if wanted else ""
        device.captured.add(self)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._made != 0

    def run(self, memory: Hashable = None) -> None:
        """Queue the work once. `memory` identifies the memory it uses, by addresses and shapes, if that may change."""
        if self._made and memory == self._seen:
            self._launch()
            return
        if self._to_say:
            self._say(self._to_say)
            self._to_say = ""
        if not self._made and self.obstacle is None:
            if memory != self._seen:
                self._seen, self._times = memory, 0
            self._times += 1
            if self._times > WARM and self._capture():
                self._launch()
                return
        self._queue()

    def forget(self) -> None:
        """Discard the graph, since its memory may be reallocated; it is captured again after WARM runs."""
        graph, made, self._graph, self._made = self._graph, self._made, 0, 0
        self._times = 0
        if graph:
            with contextlib.suppress(CudaError):
                runtime = self._device.here()
                self._device.wait(lambda: runtime.wait(self._device.stream))
                runtime.forget_graph(graph, made)

    def _launch(self) -> None:
        try:
            self._device.here().launch(self._made, self._device.stream)
        except CudaError as error:
            raise self._device.failure(error.message) from error

    def _capture(self) -> bool:
        runtime = self._device.here()
        try:
            graph = self._captured_work(runtime)
        except (CudaError, OrtflowError, NotCaptured) as error:
            self._give_up(str(error))
            return False
        made = 0
        try:
            fault = graph_fault(runtime, graph)
            if not fault:
                made = runtime.instantiate(graph)
        except CudaError as error:
            fault = error.message
        if fault:
            with contextlib.suppress(CudaError):
                runtime.forget_graph(graph, 0)
            self._give_up(fault)
            return False
        self._graph, self._made = graph, made
        self._note(f"{self._name} is captured as a CUDA graph")
        return True

    def _captured_work(self, runtime: Runtime) -> int:
        """Capture the work without running it. Raises the error if that fails."""
        stream = self._device.stream
        # Memory freed by the garbage collector would invalidate the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            runtime.begin_capture(stream)
            self._device.capturing = True
            try:
                self._queue()
            except BaseException:
                with contextlib.suppress(CudaError):
                    graph = runtime.end_capture(stream)
                    if graph:
                        runtime.forget_graph(graph, 0)
                raise
            graph = runtime.end_capture(stream)
        finally:
            self._device.capturing = False
            if collects:
                gc.enable()
        if not graph:
            raise NotCaptured("CUDA returned no graph")
        return graph

    def _give_up(self, reason: str) -> None:
        self.obstacle = reason
        self._say(reason)

    def _say(self, reason: str) -> None:
        self._note(f"{self._name} is not captured as a CUDA graph: {' '.join(reason.split())}")


def graph_fault(runtime: Runtime, graph: int) -> str:
    """Why a captured graph must not be launched again; empty if it may.

    Copies from or to host memory, and host calls, use memory that ONNX Runtime held during the capture; by the next
    launch
    it may contain something else.
    """
    found: collections.Counter[str] = collections.Counter()
    nodes = runtime.nodes(graph)
    for node in nodes:
        kind = runtime.node_type(node)
        if kind == HOST:
            found["a host call"] += 1
        elif kind == COPY:
            source, target = runtime.copy_ends(node)
            for end, what in ((source, "a copy from the host"), (target, "a copy to the host")):
                if end and not runtime.on_device(end):
                    found[what] += 1
    if not nodes:
        return "it is empty"
    return ", ".join(f"{what}, {count} times" if count > 1 else what for what, count in found.items())
