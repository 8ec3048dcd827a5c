"""Asynchronous copies between host memory and a GPU, through pinned memory.

Used by `cuda` for a step's inputs and for values that are read back.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device.cudart import TO_DEVICE, TO_HOST, CudaError, Runtime

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice
    from ortflow.workflow.device.cuda_buffer import CudaBuffer


class Pinned:
    """Pinned memory, and the event after the last copy from or to it."""

    def __init__(self, runtime: Runtime, size: int) -> None:
        self._runtime, self.size = runtime, size
        self.event = runtime.event()
        self.pointer = runtime.pin(size)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            with contextlib.suppress(CudaError):
                self._runtime.wait_event(self.event)
                self._runtime.unpin(self.pointer)
                self._runtime.forget_event(self.event)


class Locked:
    """Memory of this process that stays page-locked as long as this lives, so that a GPU copies to it by itself.

    Raises CudaError.
    """

    def __init__(self, runtime: Runtime, memory: mmap.mmap) -> None:
        self._memory = np.frombuffer(memory, np.uint8)
        runtime.lock(self._memory.ctypes.data, self._memory.nbytes)
        self._runtime = runtime

    def __del__(self) -> None:
        if hasattr(self, "_runtime"):
            with contextlib.suppress(CudaError):
                self._runtime.unlock(self._memory.ctypes.data)


class Staging:
    """Two pinned blocks used in turn: one is filled while the GPU still copies from the other."""

    def __init__(self, runtime: Runtime, size: int) -> None:
        self._runtime = runtime
        self._blocks = [Pinned(runtime, size) for _ in range(2)]
        self.size = size

    def send(self, target: int, array: npt.NDArray[Any], stream: int) -> None:
        """Queue a copy of a contiguous array that fits into a block; it may be changed when this returns."""
        block = self._blocks[0]
        self._blocks.reverse()
        self._runtime.wait_event(block.event)
        # From pageable memory the call itself may wait for the stream (CUDA Runtime API, API synchronization behavior).
        ctypes.memmove(block.pointer, array.ctypes.data, array.nbytes)
        self._runtime.copy(target, block.pointer, array.nbytes, TO_DEVICE, stream)
        self._runtime.record(block.event, stream)


class Readback:
    """The contents of a buffer at a point of the stream, read without waiting for later work."""

    def __init__(self, device: CudaDevice, buffer: CudaBuffer) -> None:
        self._device, self._buffer = device, buffer
        self._block = Pinned(device.here(), buffer.size)

    def queue(self) -> None:
        """Read at this point of the stream."""
        runtime, block = self._device.here(), self._block
        try:
            runtime.copy(block.pointer, self._buffer.pointer, self._buffer.size, TO_HOST, self._device.stream)
            runtime.record(block.event, self._device.stream)
        except CudaError as error:
            raise self._device.failure(error.message) from error

    def read(self) -> npt.NDArray[Any]:
        """Return the values, after waiting for the GPU to reach that point."""
        try:
            self._device.wait(lambda: self._device.here().wait_event(self._block.event))
        except CudaError as error:
            raise self._device.failure(error.message) from error
        values = np.empty(self._buffer.count, self._buffer.dtype)
        ctypes.memmove(values.ctypes.data, self._block.pointer, self._buffer.size)
        return values
