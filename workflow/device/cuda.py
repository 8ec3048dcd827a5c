"""Flat buffers in the memory of one NVIDIA GPU, and ONNX Runtime's CUDA provider on one stream.

Everything of a rank is queued on that stream: copies, graphs, sums. So each sees what was queued before it, and only
reading waits for the GPU.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cudart import TO_DEVICE, TO_HOST, WITHIN, Blas, CudaError, Gpu, Runtime
from ortflow.workflow.errors import OrtflowError, UserError

ALIGNMENT = 256
"""Bytes: what CUDA's own allocations keep; a buffer never is smaller."""
CLAIMED = 0.1
"""Share of a GPU's memory above which somebody else's use of it is a reason to run out."""


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

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """A copy on the host, in `out` if given; waits for everything queued."""
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


class _Memory:
    """One allocation, given back when nobody holds it."""

    def __init__(self, runtime: Runtime, size: int) -> None:
        self._runtime = runtime
        self.pointer = runtime.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            with contextlib.suppress(CudaError):
                self._runtime.free(self.pointer)


class CudaDevice:
    """One GPU. `precise`: products of fp32 in fp32, as the CPU has them, not in TF32's 10 bits."""

    kind = "cuda"

    def __init__(self, runtime: Runtime, gpu: Gpu, *, precise: bool = True, stream: int | None = None) -> None:
        self.gpu, self.index, self._precise = gpu, gpu.index, precise
        self._runtime, self._thread = runtime, threading.local()
        self._blas: Blas | None = None
        self._here()
        self.stream = runtime.stream() if stream is None else stream

    @property
    def name(self) -> str:
        """The GPU and, if not fp32, the precision of its products."""
        return self.gpu.name if self._precise else f"{self.gpu.name}, TF32"

    def _here(self) -> Runtime:
        """The runtime, this thread on this GPU: the writer of checkpoints reads from a thread of its own."""
        if not getattr(self._thread, "set", False):
            self._runtime.use(self.index)
            self._thread.set = True
        return self._runtime

    def allocate(self, count: int, dtype: npt.DTypeLike) -> CudaBuffer:
        """A zeroed buffer."""
        kind = np.dtype(dtype)
        try:
            memory = _Memory(self._here(), max(count * kind.itemsize, ALIGNMENT))
        except CudaError as error:
            raise self.failure(error.words) from error
        buffer = CudaBuffer(self, memory, memory.pointer, kind, count)
        buffer.fill(0)
        return buffer

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None) -> CudaBuffer:
        """See the protocol."""
        if isinstance(before, CudaBuffer) and before.dtype == array.dtype and before.count >= array.size:
            buffer = before.slice(0, array.size)
        else:
            buffer = self.allocate(array.size, array.dtype)
        buffer.write(array)
        return buffer

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Queue a copy; one from or to the host is over when this returns."""
        if not size:
            return
        runtime = self._here()
        try:
            runtime.copy(target, source, size, kind, self.stream)
            if kind != WITHIN:
                runtime.wait(self.stream)
        except CudaError as error:
            raise self.failure(error.words) from error

    def zero(self, target: int, size: int) -> None:
        """Queue the setting of bytes to zero."""
        if size:
            self._here().zero(target, size, self.stream)

    def add(self, target: int, source: int, count: int) -> None:
        """Queue target += source, fp32."""
        self._here()
        if self._blas is None:
            from ortflow.workflow.device.cudart import blas

            self._blas = blas(self.stream)
        self._blas.add(target, source, count)

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The CUDA provider on the stream; arithmetic with shapes, and what it has no kernel for, run on the CPU."""
        options = {
            "device_id": str(self.index),
            "user_compute_stream": str(self.stream),
            # Another start must choose the same algorithm: the curve goes on bit for bit.
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0" if self._precise else "1",
        }
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def exact(self) -> CudaDevice:
        """See the protocol; it shares the stream."""
        return self if self._precise else CudaDevice(self._runtime, self.gpu, stream=self.stream)

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
                f"the memory of {self.gpu.name} is full: others held {_gib(claimed)} of its {_gib(total)} GiB when "
                f"this rank began ({message})"
            )
        return UserError(
            f"the memory of {self.gpu.name}, {_gib(total)} GiB, is full ({message})",
            where="data.micro_batch",
            fix="lower it: train.global_batch or a larger train.gradient_accumulation keep the batch of a step",
        )

    def synchronize(self) -> None:
        """Wait for everything queued."""
        try:
            self._here().wait(self.stream)
        except CudaError as error:
            raise self.failure(error.words) from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
