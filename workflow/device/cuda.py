"""One NVIDIA GPU: its buffers' copies and sums, and ONNX Runtime's CUDA provider, on one stream.

All work of a rank is queued on that stream: copies, graphs, sums. Each operation therefore sees the earlier ones, and
only reading waits for the GPU. Other threads, which write checkpoints or prefetch batches, copy on streams of their
own: they neither wait for the queued step nor become part of a captured one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.blas import Blas, blas
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.cuda_buffer import ALIGNMENT, CudaBuffer, Foreign, Memory
from ortflow.workflow.device.cudart import TO_DEVICE, WITHIN, CudaError, Gpu, Runtime
from ortflow.workflow.device.prefetch import WORTHWHILE, Prefetch
from ortflow.workflow.device.staging import Locked, Readback, Staging
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.memory import HELP, KEPT, fullest

CLAIMED = 0.1
"""Share of a GPU's memory in use by others above which they are reported as the cause of a full memory."""


class Captured(Protocol):
    """Captured work, which contains addresses."""

    def forget(self) -> None:
        """Discard the captured work, so that it is captured again."""


class CudaDevice:
    """One GPU. `precision` is as in `train.precision`; fp32 products use TF32 only with `tf32`.

    Sessions of all devices of a GPU allocate from one arena: where a process has several, whose work is captured, they
    must share `captured`.
    """

    kind = "cuda"

    def __init__(
        self,
        runtime: Runtime,
        gpu: Gpu,
        *,
        precision: str = "fp32",
        stream: int | None = None,
        captured: weakref.WeakSet[Captured] | None = None,
    ) -> None:
        self.gpu, self.index, self.precision = gpu, gpu.index, precision
        self._runtime, self._thread = runtime, threading.local()
        self._blas: Blas | None = None
        self.account: Callable[[], Mapping[str, int]] = dict
        """Returns the bytes in use by part, for the error message if memory is full; set by step `runtime`."""
        self.here()
        self.stream = runtime.stream() if stream is None else stream
        self.owner = threading.get_ident()
        self._settled: int | None = None
        self._drain: tuple[int, int] | None = None
        self._copies: int | None = None
        self._others = threading.Lock()
        self._pins = True
        self._least_free = gpu.free
        self._memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.capturing = False
        """Whether queued work is being captured, so that nothing may wait."""
        self.captured: weakref.WeakSet[Captured] = weakref.WeakSet() if captured is None else captured
        """Work that `memory_moves` discards."""
        self.edits: list[Callable[[int], object]] = []
        """Called with each captured graph, a cudaGraph_t, before it is instantiated. May raise OrtflowError."""
        self.after_wait: list[Callable[[], None]] = []
        """Called after each wait; each raises if the wait ended because a collective of its was aborted."""

    @property
    def name(self) -> str:
        """The GPU and, if not fp32, the precision of its products."""
        return self.gpu.name if self.precision == "fp32" else f"{self.gpu.name}, {self.precision.upper()}"

    def here(self) -> Runtime:
        """The runtime, with this thread's device set: checkpoints are read from another thread."""
        if not getattr(self._thread, "set", False):
            self._runtime.use(self.index)
            self._thread.set = True
        return self._runtime

    def allocate(self, count: int, dtype: npt.DTypeLike) -> CudaBuffer:
        """A zeroed buffer."""
        kind = np.dtype(dtype)
        try:
            memory = Memory(self.here(), max(count * kind.itemsize, ALIGNMENT))
        except CudaError as error:
            raise self.failure(error.message) from error
        self._memories.add(memory)
        buffer = CudaBuffer(self, memory, memory.pointer, kind, count)
        buffer.fill(0)
        return buffer

    def view(self, pointer: int, count: int, dtype: npt.DTypeLike) -> CudaBuffer:
        """See the protocol."""
        kind = np.dtype(dtype)
        return CudaBuffer(self, Foreign(pointer, count * kind.itemsize), pointer, kind, count)

    def reserve(self, size: int) -> int:
        """Address of `size` bytes that are never freed nor zeroed. Raises CudaError."""
        return self.here().allocate(size)

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None, *, prefetched: bool = False) -> CudaBuffer:
        """See the protocol."""
        buffer = None
        if isinstance(before, CudaBuffer) and before.dtype == array.dtype:
            # A smaller batch must not release the memory of larger ones.
            buffer = before.grown(array.size)
        if buffer is None:
            buffer = self.allocate(array.size, array.dtype)
        if prefetched:
            buffer.fetch(array)
        else:
            buffer.send(array)
        return buffer

    def prefetch(self, array: npt.NDArray[Any], buffer: Buffer) -> None:
        """See the protocol."""
        assert isinstance(buffer, CudaBuffer)
        buffer.prefetch(array)

    def prefetch_to(self, memory: Memory | Foreign, size: int) -> Prefetch | None:
        """What copies arrays of so many bytes to an allocation; None if that gains nothing or cannot pin memory."""
        if memory.prefetch is None and self._pins and size >= WORTHWHILE:
            try:
                memory.prefetch = Prefetch(self, memory.size)
            except CudaError as error:
                self._cannot_pin(error)
        return memory.prefetch

    def copy_stream(self) -> int:
        """The stream for copies of batches from pinned memory."""
        if self._copies is None:
            self._copies = self.here().stream()
        return self._copies

    def _cannot_pin(self, error: CudaError) -> None:
        self._pins = False
        print(f"batches are copied through pageable memory: {error.message}", flush=True)

    def send(self, memory: Memory | Foreign, target: int, array: npt.NDArray[Any]) -> None:
        """Queue a copy of a contiguous array into a part of an allocation, through pinned memory of the same size.

        If the host has no memory to pin, the copy has finished when this returns.
        """
        runtime = self.here()
        if self._pins and memory.staging is None:
            try:
                memory.staging = Staging(runtime, memory.size)
            except CudaError as error:
                self._cannot_pin(error)
        if memory.staging is None:
            self.copy(target, array.ctypes.data, array.nbytes, TO_DEVICE)
            return
        try:
            memory.staging.send(target, array, self.stream)
        except CudaError as error:
            raise self.failure(error.message) from error

    def readback(self, buffer: CudaBuffer) -> Readback:
        """Read a buffer repeatedly at a point of the stream."""
        return Readback(self, buffer)

    def wait(self, until: Callable[[], None]) -> None:
        """Wait for the GPU; raises what `after_wait` raises. Every wait goes through here."""
        until()
        for check in self.after_wait:
            check()

    def settle(self) -> None:
        """Mark the present point of the stream: other threads read the state at the last mark."""
        if self._settled is None:
            self._settled = self.here().event()
        self.here().record(self._settled, self.stream)

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Queue a copy; one from or to the host has finished when this returns."""
        if not size:
            return
        runtime = self.here()
        try:
            stream = self._stream_here(runtime)
            runtime.copy(target, source, size, kind, stream)
            if kind != WITHIN:
                self.wait(lambda: runtime.wait(stream))
        except CudaError as error:
            raise self.failure(error.message) from error

    def _stream_here(self, runtime: Runtime) -> int:
        """The stream for this thread's copies, after the work that they must see."""
        if threading.get_ident() == self.owner:
            return self.stream
        with self._others:
            if self._drain is None:
                self._drain = runtime.stream(), runtime.event()
            stream, event = self._drain
            if self._settled is None:
                runtime.record(event, self.stream)
            runtime.after(stream, event if self._settled is None else self._settled)
            return stream

    def zero(self, target: int, size: int) -> None:
        """Queue setting bytes to zero."""
        if size:
            self.here().zero(target, size, self.stream)

    def add(self, target: int, source: int, count: int) -> None:
        """Queue target += source, fp32."""
        self.blas().add(target, source, count)

    def scale(self, target: int, factor: float, count: int) -> None:
        """Queue target *= factor, fp32."""
        self.blas().scale(target, factor, count)

    def blas(self) -> Blas:
        """cuBLAS on the stream."""
        self.here()
        if self._blas is None:
            self._blas = blas(self.stream)
        return self._blas

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The CUDA provider on the stream; shape arithmetic, and operators it does not support, run on the CPU."""
        options = {
            "device_id": str(self.index),
            "user_compute_stream": str(self.stream),
            # A restart must select the same algorithm, so that the curve continues bit-identically.
            "cudnn_conv_algo_search": "HEURISTIC",
            # By default each extension of the arena is twice as large as the one before.
            "arena_extend_strategy": "kSameAsRequested",
            # ONNX Runtime's default is TF32 wherever the GPU has it.
            "use_tf32": "1" if self.precision == "tf32" else "0",
        }
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def free_memory(self) -> None:
        """See the protocol."""
        self.here().free_kept()

    def exact(self) -> CudaDevice:
        """See `Device.exact`; uses the same stream."""
        return self if self.precision == "fp32" else self._exact()

    def _exact(self) -> CudaDevice:
        return CudaDevice(self._runtime, self.gpu, stream=self.stream, captured=self.captured)

    def memory(self) -> dict[str, int]:
        """See the protocol."""
        return {"gpu_buffers": self.held, "gpu_peak": self.peak()}

    @property
    def held(self) -> int:
        """Bytes of all buffers that are allocated now."""
        return sum(memory.size for memory in self._memories)

    def peak(self) -> int:
        """The most bytes of the GPU in use since this rank began, beyond those in use before.

        Looked at here, and whenever memory moves: between two such moments it only grows.
        """
        free_bytes, _ = self.here().room()
        self._least_free = min(self._least_free, free_bytes)
        return self.gpu.free - self._least_free

    def memory_moves(self) -> None:
        """See the protocol."""
        with contextlib.suppress(CudaError):
            self.peak()
        for work in self.captured:
            work.forget()

    @property
    def arenas(self) -> str:
        """In the syntax of run options."""
        return f"cpu:0;gpu:{self.index}"

    def failure(self, message: str) -> OrtflowError:
        """Convert a message of CUDA or ONNX Runtime to an error; if memory is full, it names the setting that helps."""
        if not any(word in message.lower() for word in ("alloc", "out of memory")):
            return OrtflowError(f"{self.gpu.name} failed: {message}")
        claimed, total = self.gpu.total - self.gpu.free, self.gpu.total
        if claimed > CLAIMED * total:
            return OrtflowError(
                f"the memory of {self.gpu.name} is full: other processes used {_gib(claimed)} of its "
                f"{_gib(total)} GiB when "
                f"this rank began ({message})"
            )
        name, size = fullest(self.account(), total)
        key, fix = HELP[name]
        return UserError(
            f"the memory of {self.gpu.name}, {_gib(total)} GiB, is full, mostly of {name}, {_gib(size)} GiB "
            f"({message})",
            where=key,
            fix=fix,
        )

    def copying(self, room: int) -> Copying:
        """See the protocol: the whole state if there is room. Few cores are busy while a GPU computes."""
        # While only the last 256 MB were copied, an update waited 848 ms for the rest of a state of 1.49 GB to be
        # written; now 3.2 ms (docs/benchmarks.md).
        return Copying(max(room, KEPT), 1.0, self._lock)

    def _lock(self, memory: mmap.mmap) -> object:
        try:
            return Locked(self.here(), memory)
        except CudaError:
            # A limit of locked memory: copies are slower.
            return None

    def synchronize(self) -> None:
        """Wait for everything queued."""
        try:
            self.wait(lambda: self.here().wait(self.stream))
        except CudaError as error:
            raise self.failure(error.message) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
