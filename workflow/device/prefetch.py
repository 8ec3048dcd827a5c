"""Batches that are copied to a GPU while it computes, through pinned memory and on a copy stream.

A copy has two halves. `send` may be called by another thread. `deliver` copies within the GPU, on the stream of the
computation, because captured work reads each input at a fixed address.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ortflow.workflow.device.cudart import TO_DEVICE, WITHIN, CudaError
from ortflow.workflow.device.staging import Pinned

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

WORTHWHILE = 64 << 10
"""Bytes from which an array is prefetched: a smaller one takes no longer to the GPU than within it."""
SLOTS = 2
"""Arrays of one input that may be on their way: that of the next step, and one of the present step."""


class _Slot:
    """A block in pinned memory and one on the GPU."""

    array: weakref.ref[npt.NDArray[Any]] | None = None
    """What the block has, or will have when the event of `pinned` has passed."""
    waiting = False
    """Whether `array` has not been delivered yet."""
    turn = 0

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._runtime = device.here()
        self.delivered = self._runtime.event()
        """Behind the last copy from the block."""
        self.pinned = Pinned(self._runtime, size)
        self.block = device.allocate(size, "uint8")
        # The block is zeroed on that stream.
        self._runtime.record(self.delivered, device.stream)

    def __del__(self) -> None:
        if hasattr(self, "delivered"):
            with contextlib.suppress(CudaError):
                self._runtime.forget_event(self.delivered)


class Prefetch:
    """Slots for arrays of at most `size` bytes.

    Constructed in the thread of the computation. Raises CudaError if the host cannot pin so much memory.
    """

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device, self.size = device, size
        self._stream = device.copy_stream()
        self._lock, self._turns = threading.Lock(), 0
        self._slots = tuple(_Slot(device, size) for _ in range(SLOTS))

    def takes(self, array: npt.NDArray[Any]) -> bool:
        """Whether an array may be given to `send` and `deliver`."""
        return WORTHWHILE <= array.nbytes <= self.size and array.flags.c_contiguous

    def send(self, array: npt.NDArray[Any]) -> _Slot:
        """Start to copy an array, which may be changed when this returns. Raises CudaError."""
        slot, runtime = self._next(), self._device.here()
        runtime.wait_event(slot.pinned.event)
        # For 77 MB of images this takes one thread 10 ms: hence in another thread, while a step runs
        # (docs/benchmarks.md).
        ctypes.memmove(slot.pinned.pointer, array.ctypes.data, array.nbytes)
        runtime.after(self._stream, slot.delivered)
        runtime.copy(slot.block.pointer, slot.pinned.pointer, array.nbytes, TO_DEVICE, self._stream)
        runtime.record(slot.pinned.event, self._stream)
        slot.array = weakref.ref(array)
        return slot

    def _next(self) -> _Slot:
        """The slot to fill: the one used longest ago among those that do not wait, or of all if all wait."""
        with self._lock:
            slot = min(self._slots, key=lambda candidate: (candidate.waiting, candidate.turn))
            self._turns += 1
            slot.array, slot.waiting, slot.turn = None, True, self._turns
            return slot

    def deliver(self, array: npt.NDArray[Any], target: int) -> None:
        """Queue the second half of a copy, and the first if the array was not sent. Raises CudaError."""
        sent = (slot for slot in self._slots if slot.array is not None and slot.array() is array)
        slot = next(sent, None) or self.send(array)
        runtime, stream = self._device.here(), self._device.stream
        runtime.after(stream, slot.pinned.event)
        runtime.copy(target, slot.block.pointer, array.nbytes, WITHIN, stream)
        runtime.record(slot.delivered, stream)
        slot.waiting = False
