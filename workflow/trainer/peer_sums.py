"""Sums buckets of the gradient over the GPUs of one machine by copies, while the multiprocessors compute.

NCCL's kernels take multiprocessors from the backward pass for as long as a sum takes (docs/benchmarks.md). Here the
GPUs' copy engines move the data, and each rank adds up its `layout.share` of every part of a bucket. Each rank

1. copies every other rank's share of a part to that rank's receive buffer, when the backward pass has computed it, and
   signals this;
2. waits until all others have sent its own share, adds them up in the order of ranks, in place, copies the sum into
   every other rank's gradient, and signals this.

The first runs on one stream and the second on another. A receive buffer has room for SLOTS parts: before a slot is
written again, its owner has signalled the sum of the part that was there. `join` waits for all sums. A share is
replaced by its sum only after its rank has sent it. Nothing waits on the host, and everything may be captured: signals
are the number of the step, which is counted on the GPU.

A self-test at the start sums known numbers. NCCL sums instead if it fails, or if the copies are not faster than PCIe.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import first_of
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.peers import PeerMemory, connect
from ortflow.workflow.cuda.operators import Operators
from ortflow.workflow.cuda.peers import PeerKernels
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import ALIGNMENT, CudaBuffer
from ortflow.workflow.device.cudart import WITHIN
from ortflow.workflow.layout import share
from ortflow.workflow.memory import ITEM

_RECEIVED = 1
"""Place of the receive buffer among a rank's allocations; the other one has the gradients."""
_SMALLEST = 1 << 22
"""Bytes of an allocation that CUDA certainly does not share with others."""
LEAST = 64 << 20
"""Bytes of gradients below which NCCL sums: smaller copies take less time than ranks wait for each other."""
PART, SLOTS = 8 << 20, 4
"""Elements of a part at most, and parts for which a receive buffer has room."""
RATE = 80e9
"""Bytes a second that a GPU has to send in the self-test: more than PCIe 5 does."""
PATIENCE = 20.0
"""Seconds that a self-test may take."""
_EDGE, _ROUNDS = 64, 3


class PeerSums:
    """The sums of a step's buckets, which begin in the order in which they were given.

    `memory`: of all ranks: the flat gradient, and `received`. `start`: address of this rank's flat gradient.
    `received`: the receive buffer: flags for two places a part, then the shares that others send.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        device: CudaDevice,
        operators: Operators,
        memory: PeerMemory,
        start: int,
        buckets: Sequence[CudaBuffer],
        received: CudaBuffer,
    ) -> None:
        self._comm, self._device, self._memory, self._received = communicator, device, memory, received
        self._rank, self._ranks = communicator.rank, communicator.world_size
        self._start, self._buckets, self._parts = start, buckets, parts_of(buckets)
        self._apart = apart_of([part.count for part in self._parts], self._ranks)
        self._flags = flags_of(len(self._parts), self._ranks)
        ends = list(accumulate((-(-bucket.count // PART) for bucket in buckets), initial=0))
        self._parts_of = {
            bucket.pointer: range(first, last) for bucket, first, last in zip(buckets, ends, ends[1:], strict=False)
        }
        runtime = device.here()
        # The step, and from byte 8 on the addresses of all ranks' flags.
        tables = np.array([rank_addresses[_RECEIVED] for rank_addresses in memory.addresses], np.uint64).view(np.uint32)
        self._numbers = device.allocate(2 + tables.size, np.uint32)
        self._numbers.write(np.concatenate([np.zeros(2, np.uint32), tables]))
        self._kernels = PeerKernels(operators, self._rank, self._ranks, self._numbers.pointer)
        self._out, self._back = runtime.urgent_stream(), runtime.urgent_stream()
        self._parted, self._sent, self._met = runtime.event(), runtime.event(), runtime.event()
        self._stop = runtime.pin(ITEM)
        ctypes.memset(self._stop, 0, ITEM)
        communicator.connection.at_end.append(self._end)

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum a bucket, in place, after the work queued so far and concurrently with later work."""
        runtime = self._device.here()
        for number in self._parts_of[buffer.pointer]:
            if number == 0:
                self._kernels.next_step(self._device.stream)
            runtime.record(self._parted, self._device.stream)
            runtime.after(self._out, self._parted)
            self._send(number)
            runtime.record(self._sent, self._out)
            runtime.after(self._back, self._sent)
            self._add_up(number)

    def join(self) -> None:
        """Queue later work after the sums of all buckets, which have begun."""
        runtime = self._device.here()
        runtime.record(self._met, self._back)
        runtime.after(self._device.stream, self._met)
        self._wait_for(self._device.stream, len(self._parts), 2 * len(self._parts))

    def self_test(self) -> str:
        """Sum known numbers in place of the gradient. Returns what is wrong, if anything is. Collective."""
        edges = [
            part.slice(max(first, at), min(last, at + _EDGE))
            for part in self._parts
            for first, last in (share(part.count, rank, self._ranks) for rank in range(self._ranks))
            for at in (first, last - _EDGE)
        ]
        timer = threading.Timer(PATIENCE, self._end)
        timer.daemon = True
        timer.start()
        for edge in edges:
            edge.write(self._known(edge) * (self._rank + 1))
        self._sum_all()
        together = self._ranks * (self._ranks + 1) // 2
        wrong = any((edge.read() != self._known(edge) * together).any() for edge in edges)
        begun = time.perf_counter()
        for _ in range(_ROUNDS):
            self._sum_all()
        self._device.synchronize()
        seconds = (time.perf_counter() - begun) / _ROUNDS
        timer.cancel()
        sent = 2 * (self._ranks - 1) / self._ranks * sum(part.size for part in self._parts)
        if ctypes.c_uint32.from_address(self._stop).value:
            return f"copies between the GPUs did not end within {PATIENCE:g} s"
        if wrong:
            return "copies between the GPUs gave wrong sums"
        return "" if sent >= RATE * seconds else f"copies between the GPUs reach {sent / seconds / 1e9:.0f} GB/s"

    def _known(self, edge: CudaBuffer) -> npt.NDArray[np.float32]:
        place = (edge.pointer - self._start) // ITEM
        return (1 + np.arange(place, place + edge.count) % 5).astype(np.float32)

    def _sum_all(self) -> None:
        for bucket in self._buckets:
            self.begin_all_reduce(bucket)
        self.join()

    def close(self) -> None:
        """Close what others have opened. Collective."""
        self._comm.connection.at_end.remove(self._end)
        self._device.synchronize()
        self._memory.close()
        self._device.here().unpin(self._stop)

    def _send(self, number: int) -> None:
        """Copy each other rank's share of a part to its receive buffer."""
        part = self._parts[number]
        if number >= SLOTS:
            summed = len(self._parts) + number - SLOTS
            self._wait_for(self._out, summed, summed + 1)
        for rank in range(self._ranks):
            first, last = share(part.count, rank, self._ranks)
            if rank != self._rank and last > first:
                target = self._memory.addresses[rank][_RECEIVED] + self._place(number, self._rank - (self._rank > rank))
                self._copy(target, part.pointer + ITEM * first, last - first, self._out)
        self._kernels.notify(self._out, self._numbers.pointer + 8, number)

    def _add_up(self, number: int) -> None:
        """Sum this rank's share of a part, and copy the sum to all others."""
        part, stream = self._parts[number], self._back
        first, last = share(part.count, self._rank, self._ranks)
        own_share = part.pointer + ITEM * first
        self._wait_for(stream, number, number + 1)
        if last > first:
            received_shares = self._received.pointer + self._place(number, 0)
            self._kernels.add_up(stream, own_share, received_shares, self._apart, last - first)
            for rank, (gradient, _) in enumerate(self._memory.addresses):
                if rank != self._rank:
                    self._copy(gradient + own_share - self._start, own_share, last - first, stream)
        self._kernels.notify(stream, self._numbers.pointer + 8, len(self._parts) + number)

    def _wait_for(self, stream: int, first: int, last: int) -> None:
        self._kernels.wait_for(stream, self._received.pointer, first, last, self._stop)

    def _copy(self, target: int, source: int, count: int, stream: int) -> None:
        self._device.here().copy(target, source, ITEM * count, WITHIN, stream)

    def _place(self, number: int, sender: int) -> int:
        """Offset in bytes of a part's share in a receive buffer; `sender` counts the ranks without the owner."""
        slot = number % SLOTS * (self._ranks - 1) + sender
        return self._flags + slot * ITEM * self._apart

    def _end(self) -> None:
        """Let no kernel wait any longer."""
        ctypes.c_uint32.from_address(self._stop).value = 1


def parts_of(buckets: Sequence[CudaBuffer]) -> list[CudaBuffer]:
    """The buckets in pieces of at most PART elements."""
    return [bucket.slice(at, at + PART) for bucket in buckets for at in range(0, bucket.count, PART)]


def counts_of(buckets: Iterable[int]) -> list[int]:
    """Elements of the pieces of buckets of so many elements."""
    return [min(PART, count - at) for count in buckets for at in range(0, count, PART)]


def apart_of(parts: Sequence[int], ranks: int) -> int:
    """Elements between the beginnings of two shares in a receive buffer, for parts of so many elements."""
    return max(share(count, 0, ranks)[1] for count in parts)


def received_size(buckets: Sequence[int], ranks: int) -> int:
    """Bytes of a receive buffer for buckets of so many elements; 0 if copies do not sum so few."""
    if ITEM * sum(buckets) < LEAST:
        return 0
    parts = counts_of(buckets)
    return max(flags_of(len(parts), ranks) + SLOTS * (ranks - 1) * ITEM * apart_of(parts, ranks), _SMALLEST)


def flags_of(parts: int, ranks: int) -> int:
    """Bytes of the flags at its beginning, for so many parts."""
    return -(-2 * parts * ranks * ITEM // ALIGNMENT) * ALIGNMENT


def peer_sums(
    communicator: NcclCommunicator, operators: Operators, sync: CudaBuffer, buckets: Sequence[CudaBuffer]
) -> PeerSums | str:
    """The sums of these parts of `sync`, or why there are none. Collective."""
    device, below = communicator.device, communicator.below
    size = received_size([bucket.count for bucket in buckets], communicator.world_size)
    if sync.size < _SMALLEST or not size:
        return "the model is small"
    received = device.allocate(size, np.uint8)
    memory = connect(below, device, [sync.pointer, received.pointer])
    if isinstance(memory, str):
        return memory
    sums = PeerSums(communicator, device, operators, memory, sync.pointer, buckets, received)
    trouble = first_of(below, sums.self_test())
    # Not before: while another rank is in the self-test, it may still copy.
    sync.fill(0)
    if trouble is None:
        return sums
    sums.close()
    return trouble
