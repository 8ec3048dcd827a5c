"""Work that is queued again and again on the same memory: captured as a CUDA graph, then queued by one call.

Used by the trainer on GPUs. What cannot be captured is queued piece by piece, as before, and one line says why.
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
"""Runs before the capture: memory has grown then, kernels are loaded, and algorithms chosen."""
COPY, HOST = 1, 3
"""cudaGraphNodeType: a copy of memory, a call of a function on the host."""


class NotCaptured(Exception):
    """Why work stays as it is, in words."""


class Repeated:
    """Work that `queue` puts on the device's stream, `name` in the log.

    `queue` may neither wait for the GPU nor depend on anything but what lies in the same memory each time.
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
        """Queue the work once. `memory` tells which memory it is on, addresses and shapes, where that may change."""
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
        """Give up the graph, as others may get the memory that it uses; it is made anew behind as many runs."""
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
            raise self._device.failure(error.words) from error

    def _capture(self) -> bool:
        runtime = self._device.here()
        try:
            graph = self._noted(runtime)
        except (CudaError, OrtflowError, NotCaptured) as error:
            self._give_up(str(error))
            return False
        made = 0
        try:
            trouble = trouble_in(runtime, graph)
            if not trouble:
                made = runtime.instantiate(graph)
        except CudaError as error:
            trouble = error.words
        if trouble:
            with contextlib.suppress(CudaError):
                runtime.forget_graph(graph, 0)
            self._give_up(trouble)
            return False
        self._graph, self._made = graph, made
        self._note(f"{self._name} is captured as a CUDA graph")
        return True

    def _noted(self, runtime: Runtime) -> int:
        """The graph of the work, none of which is done. Raises what went wrong."""
        stream = self._device.stream
        # Memory that the collector gives back would end the capture.
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


def trouble_in(runtime: Runtime, graph: int) -> str:
    """Why a captured graph must not be launched again; empty if it may.

    A copy from or to the host's memory, and a host call, use what ONNX Runtime had there while it was captured;
    by the next launch something else may lie there.
    """
    found: collections.Counter[str] = collections.Counter()
    nodes = runtime.nodes(graph)
    for node in nodes:
        kind = runtime.node_type(node)
        if kind == HOST:
            found["a host call"] += 1
        elif kind == COPY:
            source, target = runtime.copy_ends(node)
            for end, words in ((source, "a copy from the host"), (target, "a copy to the host")):
                if end and not runtime.on_device(end):
                    found[words] += 1
    if not nodes:
        return "it is empty"
    return ", ".join(f"{words}, {count} times" if count > 1 else words for words, count in found.items())
