"""Work that is queued repeatedly on the same memory: captured as a CUDA graph, then launched by one call.

Used by the trainer on GPUs. Work that cannot be captured is queued piece by piece, and one log line says why. Work that
contains sums over the ranks is captured on all ranks or on none, and launched on all or on none: NCCL requires it.
Work between messages to other ranks is captured where none is awaited: making a graph may wait for the GPU.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

from ortflow.workflow.device.cudart import CudaError, Runtime
from ortflow.workflow.errors import OrtflowError

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

WARM = 3
"""Runs before the capture, in which memory grows, kernels are loaded and algorithms are selected."""
WARM_DEFERRED = 2
"""The same for deferred work, whose kernels other work has loaded."""
COPY, HOST = 1, 3
"""cudaGraphNodeType: a memory copy, a host function call."""


class Stage(enum.IntEnum):
    """What a rank can do with its work the next time."""

    QUEUE = 0
    CAPTURE = 1
    LAUNCH = 2


class Agreement(Protocol):
    """The ranks whose work contains sums over all of them. Both methods are collective."""

    def least(self, stage: Stage) -> Stage:
        """The least of the ranks' stages."""

    def obstacle(self, mine: str) -> str:
        """Why the first rank that could not capture its work could not, and which it is."""


class NotCaptured(Exception):
    """Raised if work cannot be captured; the message says why."""


class Repeated:
    """Work that `queue` puts on the device's stream; `name` is its name in the log.

    `queue` must not wait for the GPU or depend on anything but the contents of the same memory. With `agreement` every
    `run`, `skip` and `prepare` is collective. `deferred` work is captured in `prepare` only.
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
        agreement: Agreement | None = None,
        deferred: bool = False,
    ) -> None:
        self._deferred = deferred
        self._agreement = agreement if wanted else None
        self._device, self._name, self._queue, self._note = device, name, queue, note
        self._seen: Hashable = None
        self._times = 0
        self._graph = self._executable = 0
        self._new = False
        self.obstacle: str | None = obstacle or None if wanted else "nobody wants it"
        """Why it is not captured; None if it is, or may be."""
        self._to_say = obstacle if wanted else ""
        device.captured.add(self)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._executable != 0

    def run(self, memory: Hashable = None) -> None:
        """Queue the work once. `memory` identifies the memory it uses, by addresses and shapes, if that may change."""
        if self._to_say:
            self._say(self._to_say)
            self._to_say = ""
        stage = self._stage(memory)
        if self._agreement is not None:
            stage = self._agreement.least(stage)
        if stage is Stage.LAUNCH or (stage is Stage.CAPTURE and self._captures()):
            self._launch()
        else:
            self._queue()

    def skip(self) -> None:
        """Called in place of `run` where this rank has no such work: the other ranks queue theirs."""
        if self._agreement is not None:
            self._agreement.least(Stage.QUEUE)

    def prepare(self) -> None:
        """Capture deferred work that has run often enough, on the memory of its last run."""
        stage = Stage.QUEUE
        if self._executable:
            stage = Stage.LAUNCH
        elif self.obstacle is None and self._times >= WARM_DEFERRED:
            stage = Stage.CAPTURE
        if self._agreement is not None:
            stage = self._agreement.least(stage)
        if stage is Stage.CAPTURE and self._captures():
            try:
                self._device.here().upload(self._executable, self._device.stream)
            except CudaError as error:
                raise self._device.failure(error.message) from error

    def _stage(self, memory: Hashable) -> Stage:
        if self._executable and memory == self._seen:
            return Stage.LAUNCH
        if self._executable or self.obstacle is not None:
            return Stage.QUEUE
        if memory != self._seen:
            self._seen, self._times = memory, 0
        self._times += 1
        return Stage.CAPTURE if self._times > WARM and not self._deferred else Stage.QUEUE

    def _captures(self) -> bool:
        """Capture the work, unless it is. Returns whether this rank, and all others with an agreement, have a graph."""
        fault = "" if self._executable else self._capture()
        if self._agreement is not None:
            least = self._agreement.least(Stage.QUEUE if fault else Stage.LAUNCH)
            if least is not Stage.LAUNCH:
                fault = self._agreement.obstacle(fault)
        if fault:
            self.forget()
            self.obstacle = fault
            self._say(fault)
        elif self._new:
            self._new = False
            self._note(f"{self._name} is captured as a CUDA graph")
        return not fault

    def forget(self) -> None:
        """Discard the graph, since its memory may be reallocated; it is captured again after WARM runs."""
        graph, executable, self._graph, self._executable = self._graph, self._executable, 0, 0
        self._times = 0
        if graph:
            with contextlib.suppress(CudaError):
                runtime = self._device.here()
                self._device.wait(lambda: runtime.wait(self._device.stream))
                runtime.forget_graph(graph, executable)

    def _launch(self) -> None:
        try:
            self._device.here().launch(self._executable, self._device.stream)
        except CudaError as error:
            raise self._device.failure(error.message) from error

    def _capture(self) -> str:
        """Make the graph. Returns why that is not possible; empty if it is done."""
        runtime = self._device.here()
        try:
            graph = captured(runtime, self._device.stream, self._noted)
        except (CudaError, OrtflowError, NotCaptured) as error:
            return str(error) or type(error).__name__
        executable = 0
        try:
            fault = graph_fault(runtime, graph)
            if not fault:
                for edit in self._device.edits:
                    edit(graph)
                executable = runtime.instantiate(graph)
        except (CudaError, OrtflowError) as error:
            fault = str(error)
        if fault:
            with contextlib.suppress(CudaError):
                runtime.forget_graph(graph, 0)
            return fault
        self._graph, self._executable, self._new = graph, executable, True
        return ""

    def _noted(self) -> None:
        """Queue the work while it is captured."""
        self._device.capturing = True
        try:
            self._queue()
        finally:
            self._device.capturing = False

    def _say(self, reason: str) -> None:
        self._note(f"{self._name} is not captured as a CUDA graph: {' '.join(reason.split())}")


def captured(runtime: Runtime, stream: int, queue: Callable[[], None]) -> int:
    """The graph of what `queue` queues on a stream, which is not run. Raises the error if that fails."""
    # Memory freed by the garbage collector would invalidate the capture.
    collects = gc.isenabled()
    gc.disable()
    try:
        runtime.begin_capture(stream)
        try:
            queue()
        except BaseException:
            with contextlib.suppress(CudaError):
                graph = runtime.end_capture(stream)
                if graph:
                    runtime.forget_graph(graph, 0)
            raise
        graph = runtime.end_capture(stream)
    finally:
        if collects:
            gc.enable()
    if not graph:
        raise NotCaptured("CUDA returned no graph")
    return graph


def graph_fault(runtime: Runtime, graph: int) -> str:
    """Why a captured graph must not be launched again; empty if it may."""
    # Copies from or to host memory, and host calls, use memory that ONNX Runtime held during the capture. By the next
    # launch it may contain something else.
    faults: collections.Counter[str] = collections.Counter()
    nodes = runtime.nodes(graph)
    for node in nodes:
        kind = runtime.node_type(node)
        if kind == HOST:
            faults["a host call"] += 1
        elif kind == COPY:
            source, target = runtime.copy_ends(node)
            for end, description in ((source, "a copy from the host"), (target, "a copy to the host")):
                if end and not runtime.on_device(end):
                    faults[description] += 1
    if not nodes:
        return "it is empty"
    return ", ".join(
        f"{description}, {count} times" if count > 1 else description for description, count in faults.items()
    )
