"""Flat buffers in host memory that a GPU copies from and to by itself, while other work of it continues.

Used for the optimizer's state that is off-loaded. Every access from the host first waits for the last copy.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device.staging import Pinned

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice


class PinnedBuffer:
    """Elements of a block of pinned memory, which lives as long as any buffer in it."""

    def __init__(self, device: CudaDevice, block: Pinned, pointer: int, dtype: np.dtype[Any], count: int) -> None:
        self._device, self._block, self._pointer = device, block, pointer
        size = count * dtype.itemsize
        memory = memoryview((ctypes.c_char * size).from_address(pointer)) if size else b""
        self._array: npt.NDArray[Any] = np.frombuffer(memory, dtype)

    @classmethod
    def zeros(cls, device: CudaDevice, count: int, dtype: npt.DTypeLike) -> PinnedBuffer:
        """A new block of zeros. Raises CudaError if the host cannot pin so much memory."""
        kind = np.dtype(dtype)
        block = Pinned(device.here(), count * kind.itemsize)
        buffer = cls(device, block, block.pointer, kind, count)
        buffer._array.fill(0)
        return buffer

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return self._pointer

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self._array.dtype

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self._array.size)

    def slice(self, start: int, stop: int) -> PinnedBuffer:
        """Elements [start, stop), the same memory."""
        start, stop, _ = slice(start, stop).indices(self.count)
        pointer = self._pointer + start * self.dtype.itemsize
        return PinnedBuffer(self._device, self._block, pointer, self.dtype, max(0, stop - start))

    def copied(self, stream: int) -> None:
        """Later accesses wait for what is queued on the stream by now."""
        self._device.here().record(self._block.event, stream)

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """A copy, in `out` if given."""
        array = self._here()
        if out is None:
            return np.array(array)
        np.copyto(out, array)
        return out

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy from `values`."""
        np.copyto(self._here(), values.reshape(-1))

    def copy_from(self, other: PinnedBuffer) -> None:
        """Copy another buffer."""
        np.copyto(self._here(), other._here())

    def scale(self, factor: float) -> None:
        """Multiply every element."""
        self.write(self.read() * np.float32(factor))

    def fill(self, value: float) -> None:
        """Set every element."""
        self._here().fill(value)

    def add(self, other: PinnedBuffer) -> None:
        """Add another buffer, element by element."""
        array = self._here()
        np.add(array, other._here(), out=array)

    def _here(self) -> npt.NDArray[Any]:
        runtime = self._device.here()
        self._device.wait(lambda: runtime.wait_event(self._block.event))
        return self._array
