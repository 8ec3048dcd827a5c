"""Messages from one rank's GPU to another's: each link has a communicator of the two ranks and a stream of its own.

Used by `nccl`. NCCL matches messages by their order alone and keeps a stream waiting until the other rank takes part.
With one stream for all, two ranks could wait for each other's later messages; links wait only for themselves.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer

if TYPE_CHECKING:
    from ortflow.workflow.comm.nccl import NcclCommunicator

BYTES = 1
"""ncclDataType_t of uint8."""


class NcclLink:
    """Messages from rank 0 of a pair to rank 1, in order.

    Parameters
    ----------
    pair
        The communicator of the two ranks.
    device
        This rank's.
    """

    def __init__(self, pair: NcclCommunicator, device: CudaDevice) -> None:
        self._pair, self._device = pair, device
        runtime = device.here()
        runtime.keep_memory()
        self._stream, self._queued = runtime.urgent_stream(), runtime.event()
        self._free: list[int] = []
        # The first message connects the ranks, for which each of the two waits for the other.
        self.start(device.allocate(1, np.float32)).wait()
        device.synchronize()

    def start(self, buffer: CudaBuffer) -> LinkRequest:
        """Send, on rank 0, or receive, on rank 1, after the work queued so far and concurrently with later work."""
        runtime = self._device.here()
        runtime.record(self._queued, self._device.stream)
        runtime.after(self._stream, self._queued)
        name = "ncclRecv" if self._pair.rank else "ncclSend"
        message = (name, ctypes.c_void_p(buffer.pointer), ctypes.c_size_t(buffer.size), BYTES, 1 - self._pair.rank)
        self._pair.connection.queue([message], self._stream)
        self._pair.connection.watch(self._stream)
        event = self._free.pop() if self._free else runtime.event()
        runtime.record(event, self._stream)
        return LinkRequest(self, event, buffer)

    def join(self, event: int) -> None:
        """Queue later work of the device after the message with this event."""
        self._device.here().after(self._device.stream, event)
        self._free.append(event)


@dataclass(frozen=True)
class LinkRequest:
    """A message in progress. Holds its buffer, which the GPU uses until then."""

    link: NcclLink
    event: int
    buffer: CudaBuffer

    def wait(self) -> None:
        """Queue later work after the message; the host does not wait."""
        self.link.join(self.event)
