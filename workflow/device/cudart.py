"""NVIDIA's CUDA runtime by ctypes: memory, copies and one stream of this process's GPU.

The libraries come from NVIDIA's wheels beside onnxruntime-gpu; LD_LIBRARY_PATH need not be set. Only `cuda` calls
this. Must not depend on ONNX graphs or ranks.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.device.cuda_structures import CopyNode, MemoryHandle, PointerAttributes
from ortflow.workflow.device.libraries import major, preload

TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3
"""cudaMemcpyKind."""
_NON_BLOCKING = 1
_WITHOUT_TIMES = 2
"""cudaEventDisableTiming."""
_NOT_READY = 600
_OPENS_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureMode: calls that cannot be captured fail, but only in the capturing thread."""
_MAJOR, _MINOR = 75, 76
"""cudaDeviceAttr of the compute capability."""
_DEVICE_MEMORY = 2
"""cudaMemoryTypeDevice."""
_PROPERTIES = 1 << 14
"""Bytes, more than cudaDeviceProp has in any version; it starts with the name and the UUID."""


class CudaError(Exception):
    """A call that failed: CUDA's error code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Gpu:
    """Properties of a device."""

    index: int
    """Index among the devices that this process sees."""
    name: str
    uuid: str
    """The same in every process that sees it."""
    capability: tuple[int, int]
    free: int
    """Bytes that were free at the time of the query."""
    total: int


class Runtime:
    """The required calls. Each raises CudaError if it fails."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._kept: list[tuple[str, int]] | None = None
        """What to free, and by which call; None if it is freed immediately."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call any function of the library that returns a cudaError_t."""
        code = int(getattr(self.library, name)(*arguments))
        if code:
            # CUDA reports an error that can be recovered from again at the next call, unless it is cleared.
            self.library.cudaGetLastError()
            raise CudaError(code, self._message(code))

    def _message(self, code: int) -> str:
        ask = self.library.cudaGetErrorString
        ask.restype = ctypes.c_char_p
        text: bytes = ask(code) or b"an unknown error"
        return f"{text.decode()} (CUDA error {code})"

    def count(self) -> int:
        """Number of GPUs that this process sees."""
        return self._integer("cudaGetDeviceCount")

    def driver(self) -> int:
        """The newest CUDA version that the driver supports, 13020 for 13.2; 0 without a driver."""
        return self._integer("cudaDriverGetVersion")

    def version(self) -> int:
        """Version of the runtime, in the same format."""
        return self._integer("cudaRuntimeGetVersion")

    def _integer(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def use(self, index: int) -> None:
        """Set this thread's device; the first call creates its context."""
        self.call("cudaSetDevice", index)

    def describe(self, index: int) -> Gpu:
        """Query the properties of a device; creates its context."""
        self.use(index)
        free, total = self.room()
        properties = ctypes.create_string_buffer(_PROPERTIES)
        # In CUDA 12, the current structure has the second name.
        name = "cudaGetDeviceProperties_v2" if self.version() < 13000 else "cudaGetDeviceProperties"
        self.call(name, properties, index)
        return Gpu(
            index,
            properties.raw[:256].split(b"\0")[0].decode(errors="replace"),
            properties.raw[256:272].hex(),
            (
                self._integer("cudaDeviceGetAttribute", _MAJOR, index),
                self._integer("cudaDeviceGetAttribute", _MINOR, index),
            ),
            free,
            total,
        )

    def room(self) -> tuple[int, int]:
        """Free bytes of this thread's device, and all of its bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def stream(self) -> int:
        """A new stream of this thread's device, which waits for no other."""
        stream = ctypes.c_void_p()
        # A stream without this flag waits for the default stream, on which libraries may queue work of their own.
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
        return int(stream.value or 0)

    def urgent_stream(self) -> int:
        """A new stream whose kernels come before those of others that wait for a place."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.call("cudaDeviceGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        self.call("cudaStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, highest)
        return int(stream.value or 0)

    def wait(self, stream: int) -> None:
        """Until everything queued on the stream is done."""
        self.call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def allocate(self, size: int) -> int:
        """Address of so many new bytes of device memory."""
        pointer = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave."""
        self._free("cudaFree", pointer)

    def handle_of(self, pointer: int) -> bytes:
        """With which other processes of this machine open what `allocate` gave."""
        handle = MemoryHandle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Address of another process's memory, also of another GPU's, if this one reaches that."""
        pointer = ctypes.c_void_p()
        self.call("cudaIpcOpenMemHandle", ctypes.byref(pointer), MemoryHandle.from_buffer_copy(handle), _OPENS_ACCESS)
        return int(pointer.value or 0)

    def close_handle(self, pointer: int) -> None:
        """Give back what `open_handle` gave, before the other process frees it."""
        self.call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        """Queue a copy of bytes."""
        addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self.call("cudaMemcpyAsync", *addresses, ctypes.c_size_t(size), kind, ctypes.c_void_p(stream))

    def zero(self, target: int, size: int, stream: int) -> None:
        """Queue the setting of bytes to zero."""
        self.call("cudaMemsetAsync", ctypes.c_void_p(target), 0, ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def pin(self, size: int) -> int:
        """Address of so many new bytes of host memory that the GPU copies from and to by itself."""
        pointer = ctypes.c_void_p()
        self.call("cudaHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)), 0)
        return int(pointer.value or 0)

    def unpin(self, pointer: int) -> None:
        """Give back what `pin` gave."""
        self._free("cudaFreeHost", pointer)

    def lock(self, pointer: int, size: int) -> None:
        """Page-lock bytes of this process's memory, as those of `pin` are."""
        self.call("cudaHostRegister", ctypes.c_void_p(pointer), ctypes.c_size_t(size), 0)

    def unlock(self, pointer: int) -> None:
        """End that, before the memory is freed."""
        self.call("cudaHostUnregister", ctypes.c_void_p(pointer))

    def keep_memory(self) -> None:
        """Free memory only in `free_kept` from now on."""
        # Freeing waits until the GPU is idle. A message in progress keeps it busy until the other rank takes part,
        # which may itself be waiting in the same way.
        if self._kept is None:
            self._kept = []

    def free_kept(self) -> None:
        """Free what was given back; called where no rank waits for anything that this rank has yet to queue."""
        while self._kept:
            name, pointer = self._kept.pop()
            self.call(name, ctypes.c_void_p(pointer))

    def _free(self, name: str, pointer: int) -> None:
        if self._kept is None:
            self.call(name, ctypes.c_void_p(pointer))
        else:
            self._kept.append((name, pointer))

    def event(self) -> int:
        """A new mark for streams; one that was never recorded counts as passed."""
        event = ctypes.c_void_p()
        # Streams wait for an event without times at the least cost (CUDA Runtime API, cudaEventCreateWithFlags).
        self.call("cudaEventCreateWithFlags", ctypes.byref(event), _WITHOUT_TIMES)
        return int(event.value or 0)

    def forget_event(self, event: int) -> None:
        """Give back what `event` gave."""
        self.call("cudaEventDestroy", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """Put the mark behind everything queued on the stream."""
        self.call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, event: int) -> None:
        """Until the GPU has passed the mark."""
        self.call("cudaEventSynchronize", ctypes.c_void_p(event))

    def passed(self, event: int) -> bool:
        """Whether the GPU has passed the mark."""
        try:
            self.call("cudaEventQuery", ctypes.c_void_p(event))
        except CudaError as error:
            if error.code != _NOT_READY:
                raise
            return False
        return True

    def after(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on waits for the mark."""
        self.call("cudaStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def begin_capture(self, stream: int) -> None:
        """From now on note what is queued on the stream, and do none of it."""
        self.call("cudaStreamBeginCapture", ctypes.c_void_p(stream), _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """The cudaGraph_t of what was queued since `begin_capture`."""
        graph = ctypes.c_void_p()
        self.call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return int(graph.value or 0)

    def instantiate(self, graph: int) -> int:
        """The cudaGraphExec_t of a graph, ready to be launched."""
        executable = ctypes.c_void_p()
        # The signature since CUDA 12; in CUDA 11 a node and a text for its error stood in place of the flags.
        self.call("cudaGraphInstantiate", ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
        return int(executable.value or 0)

    def upload(self, executable: int, stream: int) -> None:
        """Queue what the first launch would do besides: the graph's way to the device."""
        self.call("cudaGraphUpload", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def launch(self, executable: int, stream: int) -> None:
        """Queue everything that the graph holds."""
        self.call("cudaGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def forget_graph(self, graph: int, executable: int) -> None:
        """Give back a graph and, where it is not 0, what `instantiate` made of it."""
        if executable:
            self.call("cudaGraphExecDestroy", ctypes.c_void_p(executable))
        self.call("cudaGraphDestroy", ctypes.c_void_p(graph))

    def nodes(self, graph: int) -> list[int]:
        """The cudaGraphNode_t of a graph."""
        count = ctypes.c_size_t()
        self.call("cudaGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        handles = (ctypes.c_void_p * count.value)()
        self.call("cudaGraphGetNodes", ctypes.c_void_p(graph), handles, ctypes.byref(count))
        return [int(node or 0) for node in handles[: count.value]]

    def node_type(self, node: int) -> int:
        """Its cudaGraphNodeType."""
        kind = ctypes.c_int()
        self.call("cudaGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        return kind.value

    def copy_ends(self, node: int) -> tuple[int, int]:
        """Addresses that a node of type copy reads from and writes to; 0 for a CUDA array."""
        parameters = CopyNode()
        self.call("cudaGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(parameters))
        return int(parameters.source.pointer or 0), int(parameters.target.pointer or 0)

    def on_device(self, pointer: int) -> bool:
        """Whether an address is memory of a GPU."""
        attributes = PointerAttributes()
        self.call("cudaPointerGetAttributes", ctypes.byref(attributes), ctypes.c_void_p(pointer))
        return int(attributes.kind) == _DEVICE_MEMORY


def runtime() -> Runtime:
    """The CUDA runtime; OSError if it is not installed."""
    preload()
    # Streams that share one of the GPU's queues wait for each other: a message that waits for another rank would hold
    # up the work that this rank waits for. CUDA has 8 queues unless more are asked for before it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return Runtime(ctypes.CDLL(f"libcudart.so.{major()}"))
