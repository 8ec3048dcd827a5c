"""A fake of CUDA's runtime and cuBLAS on host memory: what `cudart` calls, with the same names and arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime

GIB = 1 << 30
KERNEL, COPY, MEMSET = 0, 1, 2
"""cudaGraphNodeType."""


@dataclass(eq=False)
class Work:
    """A node of a graph: what it does and, of a copy, from where to where."""

    kind: int
    do: Callable[[], Any]
    ends: tuple[int, int] = (0, 0)


class FakeCuda:
    """`failing` maps names of functions to the errors that they return."""

    def __init__(
        self, gpus: int = 1, *, driver: int = 13000, claimed: int = 0, failing: Mapping[str, int] | None = None
    ) -> None:
        self.gpus, self.driver, self.claimed, self.failing = gpus, driver, claimed, dict(failing or {})
        self.blocks: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.opened: list[int] = []
        """Memory of other processes, which are threads here."""
        self.locked: dict[int, int] = {}
        """Page-locked memory of the process: address -> bytes."""
        self.used: list[int] = []
        self.streams: list[int] = []
        self.events: dict[int, int] = {}
        """Event -> the stream that it was recorded on last."""
        self.calls: list[tuple[str, int]] = []
        """What was called for streams and events, in order, with which of them."""
        self.recording: list[Work] | None = None
        """What is captured, while something is."""
        self.graphs: dict[int, list[Work]] = {}
        self._ended = 0
        self.nodes: dict[int, Work] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the fake has no {name}")

    def _code(self, name: str) -> int:
        return self.failing.get(name, 0)

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0

    @property
    def cudaGetErrorString(self) -> Any:  # noqa: N802
        class Words:
            restype: Any = None

            def __call__(self, code: int) -> bytes:
                return b"out of memory" if code == 2 else f"error {code}".encode()

        return Words()

    def _give(self, name: str, place: Any, value: int) -> int:
        place._obj.value = value
        return self._code(name)

    def cudaGetDeviceCount(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaGetDeviceCount", place, self.gpus)

    def cudaDriverGetVersion(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaDriverGetVersion", place, self.driver)

    def cudaRuntimeGetVersion(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaRuntimeGetVersion", place, 13000)

    def cudaDeviceGetAttribute(self, place: Any, attribute: int, index: int) -> int:  # noqa: N802
        return self._give("cudaDeviceGetAttribute", place, 9 if attribute == 75 else 0)

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.used.append(index)
        return self._code("cudaSetDevice")

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        taken = sum(block.size for block in self.blocks.values())
        free._obj.value, total._obj.value = 80 * GIB - self.claimed - taken, 80 * GIB
        return self._code("cudaMemGetInfo")

    def cudaGetDeviceProperties(self, place: Any, index: int) -> int:  # noqa: N802
        place[: 256 + 16] = b"NVIDIA Fake".ljust(256, b"\0") + bytes([index]) * 16
        return self._code("cudaGetDeviceProperties")

    def cudaStreamCreateWithFlags(self, place: Any, flags: int) -> int:  # noqa: N802
        self.streams.append(77 + len(self.streams))
        return self._give("cudaStreamCreateWithFlags", place, self.streams[-1])

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        assert stream.value in self.streams
        self.calls.append(("cudaStreamSynchronize", stream.value))
        if self.recording is not None and stream.value == 77:
            return 900  # cudaErrorStreamCaptureUnsupported
        return self._code("cudaStreamSynchronize")

    def cudaMalloc(self, place: Any, size: Any) -> int:  # noqa: N802
        if size.value > 80 * GIB:
            return 2
        if self.recording is not None:
            return 900
        block = np.full(size.value + 256, 0xFF, np.uint8)
        start = -block.ctypes.data % 256
        self.blocks[block.ctypes.data + start] = block[start : start + size.value]
        return self._give("cudaMalloc", place, block.ctypes.data + start)

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        self.blocks.pop(pointer.value)[:] = 0xEE  # later reads of it must show
        return 0

    def cudaHostAlloc(self, place: Any, size: Any, flags: int) -> int:  # noqa: N802
        block = np.full(size.value, 0xFF, np.uint8)
        self.pinned[block.ctypes.data] = block
        return self._give("cudaHostAlloc", place, block.ctypes.data)

    def cudaFreeHost(self, pointer: Any) -> int:  # noqa: N802
        self.pinned.pop(pointer.value)[:] = 0xEE
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: int, stream: Any) -> int:  # noqa: N802
        assert stream.value in self.streams
        to, origin, count = target.value, source.value, size.value
        self._work(stream.value, COPY, lambda: ctypes.memmove(to, origin, count), (origin, to))
        return self._code("cudaMemcpyAsync")

    def cudaMemsetAsync(self, target: Any, value: int, size: Any, stream: Any) -> int:  # noqa: N802
        to, count = target.value, size.value
        self._work(stream.value, MEMSET, lambda: ctypes.memset(to, value, count))
        return self._code("cudaMemsetAsync")

    def _work(self, stream: int, kind: int, do: Callable[[], Any], ends: tuple[int, int] = (0, 0)) -> None:
        if self.recording is not None and stream == 77:
            self.recording.append(Work(kind, do, ends))
        else:
            do()

    def kernel(self, do: Callable[[], Any]) -> None:
        """Queue any work on the first stream: run, or recorded during a capture."""
        self._work(77, KERNEL, do)

    def cudaDeviceGetStreamPriorityRange(self, lowest: Any, highest: Any) -> int:  # noqa: N802
        lowest._obj.value, highest._obj.value = 0, -5
        return self._code("cudaDeviceGetStreamPriorityRange")

    def cudaStreamCreateWithPriority(self, place: Any, flags: int, priority: int) -> int:  # noqa: N802
        assert (flags, priority.value) == (1, -5)
        return self.cudaStreamCreateWithFlags(place, flags)

    def cudaEventCreateWithFlags(self, place: Any, flags: int) -> int:  # noqa: N802
        event = 1000 + len(self.events)
        self.events[event] = 0
        return self._give("cudaEventCreateWithFlags", place, event)

    def cudaEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.events[event.value] = stream.value
        self.calls.append(("cudaEventRecord", event.value))
        return self._code("cudaEventRecord")

    def cudaEventSynchronize(self, event: Any) -> int:  # noqa: N802
        assert event.value in self.events
        self.calls.append(("cudaEventSynchronize", event.value))
        return self._code("cudaEventSynchronize")

    def cudaEventQuery(self, event: Any) -> int:  # noqa: N802
        assert event.value in self.events
        return self._code("cudaEventQuery")

    def cudaEventDestroy(self, event: Any) -> int:  # noqa: N802
        assert event.value in self.events
        return 0

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        assert stream.value in self.streams
        self.calls.append(("cudaStreamWaitEvent", event.value))
        return self._code("cudaStreamWaitEvent")

    def cudaIpcGetMemHandle(self, place: Any, pointer: Any) -> int:  # noqa: N802
        assert pointer.value in self.blocks
        ctypes.memmove(ctypes.addressof(place._obj), pointer.value.to_bytes(64, "little"), 64)
        return self._code("cudaIpcGetMemHandle")

    def cudaIpcOpenMemHandle(self, place: Any, handle: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.opened.append(int.from_bytes(bytes(handle), "little"))
        return self._give("cudaIpcOpenMemHandle", place, self.opened[-1])

    def cudaIpcCloseMemHandle(self, pointer: Any) -> int:  # noqa: N802
        self.opened.remove(pointer.value)
        return self._code("cudaIpcCloseMemHandle")

    def cudaHostRegister(self, pointer: Any, size: Any, flags: int) -> int:  # noqa: N802
        code = self._code("cudaHostRegister")
        if not code:
            self.locked[pointer.value] = size.value
        return code

    def cudaHostUnregister(self, pointer: Any) -> int:  # noqa: N802
        del self.locked[pointer.value]
        return 0

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> int:  # noqa: N802
        assert self.recording is None
        code = self._code("cudaStreamBeginCapture")
        self.recording = None if code else []
        return code

    def cudaStreamEndCapture(self, stream: Any, place: Any) -> int:  # noqa: N802
        assert self.recording is not None
        self._ended += 1
        graph = 5000 + self._ended
        self.graphs[graph], self.recording = self.recording, None
        return self._give("cudaStreamEndCapture", place, graph)

    def cudaGraphGetNodes(self, graph: Any, found: Any, count: Any) -> int:  # noqa: N802
        works = self.graphs[graph.value]
        count._obj.value = len(works)
        for place, work in enumerate(works if found is not None else ()):
            found[place] = id(work)
            self.nodes[id(work)] = work
        return self._code("cudaGraphGetNodes")

    def cudaGraphNodeGetType(self, node: Any, place: Any) -> int:  # noqa: N802
        return self._give("cudaGraphNodeGetType", place, self.nodes[node.value].kind)

    def cudaGraphMemcpyNodeGetParams(self, node: Any, place: Any) -> int:  # noqa: N802
        place._obj.source.pointer, place._obj.target.pointer = self.nodes[node.value].ends
        return 0

    def cudaPointerGetAttributes(self, place: Any, pointer: Any) -> int:  # noqa: N802
        for kind, blocks in ((2, self.blocks), (1, self.pinned)):
            if any(start <= pointer.value < start + block.size for start, block in blocks.items()):
                place._obj.kind = kind
                return 0
        place._obj.kind = 0
        return 0

    def cudaGraphInstantiate(self, place: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        return self._give("cudaGraphInstantiate", place, graph.value)

    def cudaGraphUpload(self, made: Any, stream: Any) -> int:  # noqa: N802
        assert made.value in self.graphs
        self.calls.append(("cudaGraphUpload", made.value))
        return self._code("cudaGraphUpload")

    def cudaGraphLaunch(self, made: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append(("cudaGraphLaunch", made.value))
        for work in self.graphs[made.value]:
            work.do()
        return self._code("cudaGraphLaunch")

    def cudaGraphExecDestroy(self, made: Any) -> int:  # noqa: N802
        return 0

    def cudaGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        del self.graphs[graph.value]
        return 0


class FakeBlas:
    """cuBLAS's sum and product, on the fake's stream if it is given."""

    def __init__(self, library: FakeCuda | None = None) -> None:
        self._work = library.kernel if library is not None else lambda do: do()

    def cublasCreate_v2(self, handle: Any) -> int:  # noqa: N802
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:  # noqa: N802
        return 0

    def cublasSaxpy_v2_64(  # noqa: N802
        self, handle: Any, count: Any, factor: Any, x: Any, x_step: Any, y: Any, y_step: Any
    ) -> int:
        first, second = (_floats(each, count) for each in (x, y))

        def add() -> None:
            with np.errstate(invalid="ignore", over="ignore"):
                np.add(second, np.float32(factor._obj.value) * first, out=second)

        self._work(add)
        return 0

    def cublasSscal_v2_64(self, handle: Any, count: Any, factor: Any, x: Any, step: Any) -> int:  # noqa: N802
        array, by = _floats(x, count), np.float32(factor._obj.value)
        self._work(lambda: np.multiply(array, by, out=array))
        return 0


def _floats(pointer: Any, count: Any) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * count.value).from_address(pointer.value))


class FakeNccl:
    """NCCL's sum over the GPUs of one process, on fake memory: what `gpu_sum` calls.

    `failing` maps names of functions to the errors that they return; `wrong` is added to the sum.
    """

    def __init__(self, *, failing: Mapping[str, int] | None = None, last: bytes = b"", wrong: float = 0.0) -> None:
        self.failing, self.last, self.wrong = dict(failing or {}), last, wrong
        self.worlds: dict[int, int] = {}
        """World -> index of its GPU."""
        self.group: list[tuple[int, int, int]] | None = None

    def ncclCommInitAll(self, worlds: Any, size: int, indices: Any) -> int:  # noqa: N802
        for place in range(size):
            worlds[place] = 1000 + place
            self.worlds[1000 + place] = indices[place]
        return self.failing.get("ncclCommInitAll", 0)

    def ncclCommDestroy(self, world: Any) -> int:  # noqa: N802
        self.worlds.pop(world.value, None)
        return 0

    def ncclGroupStart(self) -> int:  # noqa: N802
        self.group = []
        return 0

    def ncclAllReduce(  # noqa: N802
        self, source: Any, target: Any, count: Any, kind: int, how: int, world: Any, stream: Any
    ) -> int:
        assert self.group is not None
        assert (source.value, kind, how) == (target.value, 7, 0)
        self.group.append((source.value, count.value, self.worlds[world.value]))
        return self.failing.get("ncclAllReduce", 0)

    def ncclGroupEnd(self) -> int:  # noqa: N802
        assert self.group is not None
        assert sorted(index for *_, index in self.group) == sorted(self.worlds.values())
        arrays = [
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)) for address, count, _ in self.group
        ]
        total = np.sum(arrays, axis=0) + self.wrong
        for array in arrays:
            array[:] = total
        self.group = None
        return 0

    def ncclGetVersion(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 22803
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:  # noqa: N802
        return b"unhandled system error (run with NCCL_DEBUG=INFO for details)"

    def ncclGetLastError(self, world: Any) -> bytes:  # noqa: N802
        return self.last


def fake_device(library: FakeCuda | None = None) -> CudaDevice:
    """A fake GPU."""
    runtime = Runtime(library or FakeCuda())
    return CudaDevice(runtime, runtime.describe(0))
