"""Flat buffers in the memory of one NVIDIA GPU, and ONNX Runtime's CUDA provider on one stream.

Everything of a rank is queued on that stream: copies, graphs, sums. So each sees what was queued before it, and only
reading waits for the GPU. Other threads, which write checkpoints, read on streams of their own: they neither wait for
the step that is queued, nor come into one that is captured.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cudart import TO_DEVICE, TO_HOST, WITHIN, Blas, CudaError, Gpu, Runtime
from ortflow.workflow.device.staging import Readback, Staging
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.memory import HELP, fullest

ALIGNMENT = 256
"""Bytes: what CUDA's own allocations keep; a buffer never is smaller."""
CLAIMED = 0.1
"""Share of a GPU's memory above which somebody else's use of it is a reason to run out."""


class Captured(Protocol):
    """Work that is noted with the addresses that it uses."""

    def forget(self) -> None:
        """Note it anew."""


class CudaBuffer:
    """Part of an allocation, which lives as long as any part of it."""

    def __init__(self, device: CudaDevice, memory: _Memory, pointer: int, dtype: np.dtype[Any], count: int) -> None:
        self._device, self._memory = device, memory
        self._pointer, self._dtype, self._count = pointer, dtype, count

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return self._pointer

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self._dtype

    @property
    def count(self) -> int:
        """Number of elements."""
        return self._count

    @property
    def size(self) -> int:
        """Bytes."""
        return self._count * self._dtype.itemsize

    def slice(self, start: int, stop: int) -> CudaBuffer:
        """Elements [start, stop), the same memory."""
        start, stop, _ = slice(start, stop).indices(self._count)
        pointer = self._pointer + start * self._dtype.itemsize
        return CudaBuffer(self._device, self._memory, pointer, self._dtype, max(0, stop - start))

    def grown(self, count: int) -> CudaBuffer | None:
        """The first so many elements from the same place on, if the allocation has as many."""
        room = self._memory.pointer + self._memory.size - self._pointer
        if count * self._dtype.itemsize > room:
            return None
        return CudaBuffer(self._device, self._memory, self._pointer, self._dtype, count)

    def send(self, values: npt.NDArray[Any]) -> None:
        """Queue a copy from `values`, of as many elements, which may change as soon as this returns."""
        self._device.send(self._memory, self._pointer, np.ascontiguousarray(values, self._dtype))

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """A copy on the host, in `out` if given; waits for everything queued, in another thread for what is settled."""
        if out is None:
            out = np.empty(self._count, self._dtype)
        if out.size != self._count or out.dtype != self._dtype or not out.flags.c_contiguous:
            raise ValueError(f"{self._count} elements of {self._dtype} do not go into {out.dtype} {out.shape}")
        self._device.copy(out.ctypes.data, self._pointer, self.size, TO_HOST)
        return out

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy from `values`, which may change as soon as this returns."""
        values = np.ascontiguousarray(values, self._dtype)
        if values.size != self._count:
            raise ValueError(f"{values.size} values for {self._count} elements")
        self._device.copy(self._pointer, values.ctypes.data, self.size, TO_DEVICE)

    def copy_from(self, other: CudaBuffer) -> None:
        """Copy another buffer on the device."""
        if (other.count, other.dtype) != (self._count, self._dtype):
            raise ValueError(f"{other.count} elements of {other.dtype} for {self._count} of {self._dtype}")
        self._device.copy(self._pointer, other.pointer, self.size, WITHIN)

    def fill(self, value: float) -> None:
        """Set every element."""
        if value == 0:
            self._device.zero(self._pointer, self.size)
        else:
            self.write(np.full(self._count, value, self._dtype))

    def add(self, other: CudaBuffer) -> None:
        """Add another buffer of fp32, element by element."""
        if not self._dtype == other.dtype == np.float32 or self._count != other.count:
            raise ValueError(f"{other.count} elements of {other.dtype} are not added to {self._count} of {self._dtype}")
        self._device.add(self._pointer, other.pointer, self._count)

    def scale(self, factor: float) -> None:
        """Multiply every element, fp32."""
        if self._dtype != np.float32:
            raise ValueError(f"elements of {self._dtype} are not scaled")
        self._device.scale(self._pointer, factor, self._count)


class _Memory:
    """One allocation, given back when nobody holds it."""

    staging: Staging | None
    """The way of what is sent to it."""

    def __init__(self, runtime: Runtime, size: int) -> None:
        self._runtime = runtime
        self.size, self.staging = size, None
        self.pointer = runtime.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            with contextlib.suppress(CudaError):
                self._runtime.free(self.pointer)


class CudaDevice:
    """One GPU. `precision`: as in `train.precision`; products of fp32 are in TF32 only where that says so."""

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
        """Bytes of what lies on it, by part, for the sentence of a memory that is full; step `runtime` sets it."""
        self.here()
        self.stream = runtime.stream() if stream is None else stream
        self._owner = threading.get_ident()
        self._settled: int | None = None
        self._drain: tuple[int, int] | None = None
        self._others = threading.Lock()
        self._pins = True
        self.capturing = False
        """What is queued is noted for a CUDA graph, and nothing may wait."""
        self.captured: weakref.WeakSet[Captured] = weakref.WeakSet() if captured is None else captured
        """What `memory_moves` makes void."""
        self.after_wait: Callable[[], None] | None = None
        """Raises where the wait is over because something has been given up."""

    @property
    def name(self) -> str:
        """The GPU and, if not fp32, the precision of its products."""
        return self.gpu.name if self.precision == "fp32" else f"{self.gpu.name}, {self.precision.upper()}"

    def here(self) -> Runtime:
        """The runtime, this thread on this GPU: the writer of checkpoints reads from a thread of its own."""
        if not getattr(self._thread, "set", False):
            self._runtime.use(self.index)
            self._thread.set = True
        return self._runtime

    def allocate(self, count: int, dtype: npt.DTypeLike) -> CudaBuffer:
        """A zeroed buffer."""
        kind = np.dtype(dtype)
        try:
            memory = _Memory(self.here(), max(count * kind.itemsize, ALIGNMENT))
        except CudaError as error:
            raise self.failure(error.words) from error
        buffer = CudaBuffer(self, memory, memory.pointer, kind, count)
        buffer.fill(0)
        return buffer

    def reserve(self, size: int) -> int:
        """Address of so many bytes that are never given back, nor zeroed. Raises CudaError."""
        return self.here().allocate(size)

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None) -> CudaBuffer:
        """See the protocol."""
        buffer = None
        if isinstance(before, CudaBuffer) and before.dtype == array.dtype:
            # A smaller batch must not give up the room of the larger ones.
            buffer = before.grown(array.size)
        if buffer is None:
            buffer = self.allocate(array.size, array.dtype)
        buffer.send(array)
        return buffer

    def send(self, memory: _Memory, target: int, array: npt.NDArray[Any]) -> None:
        """Queue a copy of a contiguous array into a part of an allocation, by way of pinned memory of the same size.

        Where the host has none to pin, the copy is over when this returns.
        """
        runtime = self.here()
        if self._pins and memory.staging is None:
            try:
                memory.staging = Staging(runtime, memory.size)
            except CudaError as error:
                self._pins = False
                print(f"batches are copied through pageable memory: {error.words}", flush=True)
        if memory.staging is None:
            self.copy(target, array.ctypes.data, array.nbytes, TO_DEVICE)
            return
        try:
            memory.staging.send(target, array, self.stream)
        except CudaError as error:
            raise self.failure(error.words) from error

    def readback(self, buffer: CudaBuffer) -> Readback:
        """For reading a buffer at a point of the stream, again and again."""
        return Readback(self, buffer)

    def wait(self, until: Callable[[], None]) -> None:
        """Every wait for the GPU goes through here; raises what `after_wait` raises."""
        until()
        if self.after_wait is not None:
            self.after_wait()

    def settle(self) -> None:
        """What is queued up to here is what other threads read, until this is called again."""
        if self._settled is None:
            self._settled = self.here().event()
        self.here().record(self._settled, self.stream)

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Queue a copy; one from or to the host is over when this returns."""
        if not size:
            return
        runtime = self.here()
        try:
            stream = self._stream_here(runtime)
            runtime.copy(target, source, size, kind, stream)
            if kind != WITHIN:
                self.wait(lambda: runtime.wait(stream))
        except CudaError as error:
            raise self.failure(error.words) from error

    def _stream_here(self, runtime: Runtime) -> int:
        """The stream that this thread copies on, behind what it must see."""
        if threading.get_ident() == self._owner:
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
        """Queue the setting of bytes to zero."""
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
            from ortflow.workflow.device.cudart import blas

            self._blas = blas(self.stream)
        return self._blas

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The CUDA provider on the stream; arithmetic with shapes, and what it has no kernel for, run on the CPU."""
        options = {
            "device_id": str(self.index),
            "user_compute_stream": str(self.stream),
            # Another start must choose the same algorithm: the curve goes on bit for bit.
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "1" if self.precision == "tf32" else "0",
        }
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def exact(self) -> CudaDevice:
        """See `Device.exact`; uses the same stream."""
        return self if self.precision == "fp32" else self._exact()

    def _exact(self) -> CudaDevice:
        return CudaDevice(self._runtime, self.gpu, stream=self.stream, captured=self.captured)

    def memory_moves(self) -> None:
        """See the protocol."""
        for each in self.captured:
            each.forget()

    @property
    def arenas(self) -> str:
        """As run options name them."""
        return f"cpu:0;gpu:{self.index}"

    def failure(self, message: str) -> OrtflowError:
        """What CUDA or ONNX Runtime says, as an error: for memory it names the setting that helps."""
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
        where, fix = HELP[name]
        return UserError(
            f"the memory of {self.gpu.name}, {_gib(total)} GiB, is full, mostly of {name}, {_gib(size)} GiB "
            f"({message})",
            where=where,
            fix=fix,
        )

    def synchronize(self) -> None:
        """Wait for everything queued."""
        try:
            self.wait(lambda: self.here().wait(self.stream))
        except CudaError as error:
            raise self.failure(error.words) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
