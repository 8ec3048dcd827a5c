"""Flat buffers in the memory of one NVIDIA GPU. The device (`cuda`) queues their copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device.cudart import TO_DEVICE, TO_HOST, WITHIN, CudaError, Runtime
from ortflow.workflow.device.prefetch import Prefetch
from ortflow.workflow.device.staging import Staging

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

ALIGNMENT = 256
"""Bytes; the alignment of CUDA's allocations, and the smallest size of a buffer."""


class CudaBuffer:
    """Part of an allocation, which lives as long as any part of it."""

    def __init__(
        self, device: CudaDevice, memory: Memory | Foreign, pointer: int, dtype: np.dtype[Any], count: int
    ) -> None:
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

    @property
    def writes(self) -> int:
        """How often the host has written to the allocation, or has had it written; what graphs write does not count."""
        return self._memory.writes

    def _is_written(self) -> None:
        if self._count:
            self._memory.writes += 1

    def slice(self, start: int, stop: int) -> CudaBuffer:
        """Elements [start, stop), the same memory."""
        start, stop, _ = slice(start, stop).indices(self._count)
        pointer = self._pointer + start * self._dtype.itemsize
        return CudaBuffer(self._device, self._memory, pointer, self._dtype, max(0, stop - start))

    def grown(self, count: int) -> CudaBuffer | None:
        """The first `count` elements from the same position, if the allocation is large enough."""
        room = self._memory.pointer + self._memory.size - self._pointer
        if count * self._dtype.itemsize > room:
            return None
        return CudaBuffer(self._device, self._memory, self._pointer, self._dtype, count)

    def send(self, values: npt.NDArray[Any]) -> None:
        """Queue a copy from `values`, of equal length, which may be changed when this returns."""
        self._is_written()
        self._device.send(self._memory, self._pointer, np.ascontiguousarray(values, self._dtype))

    def prefetch(self, array: npt.NDArray[Any]) -> None:
        """See `Device.prefetch`."""
        prefetch = self._memory.prefetch
        if prefetch is not None and prefetch.takes(array):
            try:
                prefetch.send(array)
            except CudaError as error:
                raise self._device.failure(error.message) from error

    def fetch(self, array: npt.NDArray[Any]) -> None:
        """Queue a copy from an array that may have been prefetched."""
        prefetch = self._device.prefetch_to(self._memory, array.nbytes)
        if prefetch is None or not prefetch.takes(array):
            self.send(array)
            return
        self._is_written()
        try:
            prefetch.deliver(array, self._pointer)
        except CudaError as error:
            raise self._device.failure(error.message) from error

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """A copy on the host, in `out` if given.

        Waits for everything queued; in another thread, for what `settle` marked.
        """
        if out is None:
            out = np.empty(self._count, self._dtype)
        if out.size != self._count or out.dtype != self._dtype or not out.flags.c_contiguous:
            raise ValueError(f"{self._count} elements of {self._dtype} do not go into {out.dtype} {out.shape}")
        self._device.copy(out.ctypes.data, self._pointer, self.size, TO_HOST)
        return out

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy from `values`, which may be changed when this returns."""
        values = np.ascontiguousarray(values, self._dtype)
        if values.size != self._count:
            raise ValueError(f"{values.size} values for {self._count} elements")
        self._is_written()
        self._device.copy(self._pointer, values.ctypes.data, self.size, TO_DEVICE)

    def copy_from(self, other: CudaBuffer) -> None:
        """Copy another buffer on the device."""
        if (other.count, other.dtype) != (self._count, self._dtype):
            raise ValueError(f"{other.count} elements of {other.dtype} for {self._count} of {self._dtype}")
        self._is_written()
        self._device.copy(self._pointer, other.pointer, self.size, WITHIN)

    def fill(self, value: float) -> None:
        """Set every element."""
        self._is_written()
        if value == 0:
            self._device.zero(self._pointer, self.size)
        else:
            self.write(np.full(self._count, value, self._dtype))

    def add(self, other: CudaBuffer) -> None:
        """Add another fp32 buffer, element by element."""
        if not self._dtype == other.dtype == np.float32 or self._count != other.count:
            raise ValueError(f"{other.count} elements of {other.dtype} are not added to {self._count} of {self._dtype}")
        self._is_written()
        self._device.add(self._pointer, other.pointer, self._count)

    def scale(self, factor: float) -> None:
        """Multiply every element of an fp32 buffer."""
        if self._dtype != np.float32:
            raise ValueError(f"elements of {self._dtype} are not scaled")
        self._is_written()
        self._device.scale(self._pointer, factor, self._count)


class Memory:
    """One allocation, freed when nothing refers to it."""

    staging: Staging | None
    """Pinned memory for copies to it."""
    prefetch: Prefetch | None
    """The same for arrays that are prefetched."""

    writes = 0

    def __init__(self, runtime: Runtime, size: int) -> None:
        self._runtime = runtime
        self.size, self.staging, self.prefetch = size, None, None
        self.pointer = runtime.allocate(size)

    def __del__(self) -> None:
        # Python also calls this for an object whose constructor has raised, as for want of memory.
        if hasattr(self, "pointer"):
            with contextlib.suppress(CudaError):
                self._runtime.free(self.pointer)


class Foreign:
    """Memory of someone else."""

    writes = 0

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer, self.size = pointer, size
        self.staging: Staging | None = None
        self.prefetch: Prefetch | None = None
