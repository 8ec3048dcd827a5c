"""Sums buckets of the gradient over the GPUs of one machine by copies, while the multiprocessors compute.

NCCL's kernels take multiprocessors from the backward pass for as long as a sum takes (docs/benchmarks.md). Here the
GPUs' copy engines move the data, and each rank adds up its `layout.share` of a bucket. Of a bucket, each rank

1. copies to every other rank its share of that bucket, when the backward pass has computed it, and tells that rank;
2. waits for its own share from all others, adds them up in the order of ranks, in place, copies the sum to the place of
   that share in every other rank's gradient, and tells that rank.

The first runs on one stream and the second on another. `join` waits for what all others have told. So a rank has read
what it received before it tells that the sum is there, and all wait for that before the next step's copies; and a share
is replaced by its sum only after the rank has copied it away. Nothing waits on the host, and everything may be
captured: messages are the number of the step, counted on the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.peers import PeerMemory, connect
from ortflow.workflow.cuda.operators import Operators
from ortflow.workflow.cuda.peers import PeerKernels
from ortflow.workflow.device.cuda import ALIGNMENT, CudaBuffer, CudaDevice
from ortflow.workflow.device.cudart import WITHIN
from ortflow.workflow.layout import share
from ortflow.workflow.memory import ITEM

_GRADIENT, _POST = 0, 1
"""Which of a rank's allocations: the gradients, and what other ranks write for it."""
_SMALLEST = 1 << 22
"""Bytes of an allocation that CUDA certainly does not share with others."""


class PeerSums:
    """The sums of a step's buckets, which begin in the order in which they were given.

    Parameters
    ----------
    communicator
        All ranks.
    device, operators
        This rank's.
    memory
        Of all ranks: the flat gradient, and `post`.
    start
        Address of this rank's flat gradient.
    buckets
        Parts of it.
    post
        What others write: flags for two places a bucket, then the shares that they send.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        device: CudaDevice,
        operators: Operators,
        memory: PeerMemory,
        start: int,
        buckets: Sequence[CudaBuffer],
        post: CudaBuffer,
    ) -> None:
        self._comm, self._device, self._memory, self._post = communicator, device, memory, post
        self._rank, self._ranks = communicator.rank, communicator.world_size
        self._start, self._buckets, self._places = start, buckets, places_of(buckets, self._ranks)
        self._numbers_of = {bucket.pointer: number for number, bucket in enumerate(buckets)}
        runtime = device.here()
        # The step, and from byte 8 on the addresses of all ranks' flags.
        tables = np.array([each[_POST] for each in memory.addresses], np.uint64).view(np.uint32)
        self._numbers = device.allocate(2 + tables.size, np.uint32)
        self._numbers.write(np.concatenate([np.zeros(2, np.uint32), tables]))
        self._kernels = PeerKernels(operators, self._rank, self._ranks, self._numbers.pointer)
        self._out, self._back = runtime.urgent_stream(), runtime.urgent_stream()
        self._parted, self._sent, self._met = runtime.event(), runtime.event(), runtime.event()
        self._stop = runtime.pin(ITEM)
        ctypes.memset(self._stop, 0, ITEM)
        communicator.at_end.append(self._end)

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum a bucket, in place, after the work queued so far and concurrently with later work."""
        number, runtime = self._numbers_of[buffer.pointer], self._device.here()
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
        count = len(self._buckets)
        self._kernels.wait_for(self._device.stream, self._post.pointer, count, 2 * count, self._stop)

    def close(self) -> None:
        """Close what others have opened. Collective."""
        self._comm.at_end.remove(self._end)
        self._device.synchronize()
        self._memory.close()
        self._device.here().unpin(self._stop)

    def _send(self, number: int) -> None:
        """Each other rank's share of a bucket to its post."""
        bucket = self._buckets[number]
        for rank in range(self._ranks):
            first, last = share(bucket.count, rank, self._ranks)
            if rank != self._rank and last > first:
                slot = self._rank - (self._rank > rank)
                target = self._memory.addresses[rank][_POST] + self._place(number, slot)
                self._copy(target, bucket.pointer + ITEM * first, last - first, self._out)
        self._kernels.tell(self._out, self._numbers.pointer + 8, number)

    def _add_up(self, number: int) -> None:
        """This rank's share of a bucket: the sum, to all."""
        bucket, stream = self._buckets[number], self._back
        first, last = share(bucket.count, self._rank, self._ranks)
        mine = bucket.pointer + ITEM * first
        self._kernels.wait_for(stream, self._post.pointer, number, number + 1, self._stop)
        if last > first:
            others = self._post.pointer + self._place(number, 0)
            self._kernels.add_up(stream, mine, others, apart_of(bucket.count, self._ranks), last - first)
            for rank, (gradient, _) in enumerate(self._memory.addresses):
                if rank != self._rank:
                    self._copy(gradient + mine - self._start, mine, last - first, stream)
        self._kernels.tell(stream, self._numbers.pointer + 8, len(self._buckets) + number)

    def _copy(self, target: int, source: int, count: int, stream: int) -> None:
        self._device.here().copy(target, source, ITEM * count, WITHIN, stream)

    def _place(self, number: int, slot: int) -> int:
        """Where in a post the share of a bucket that the rank of this slot sends begins, in bytes."""
        return self._places[number] + slot * ITEM * apart_of(self._buckets[number].count, self._ranks)

    def _end(self) -> None:
        """Let no kernel wait any longer."""
        ctypes.c_uint32.from_address(self._stop).value = 1


def apart_of(count: int, ranks: int) -> int:
    """Elements from the beginning of one rank's share of a bucket to that of the next in a post."""
    return share(count, 0, ranks)[1]


def places_of(buckets: Sequence[CudaBuffer], ranks: int) -> list[int]:
    """Where in a post the shares of each bucket begin, in bytes, and where they end."""
    flags = 2 * len(buckets) * ranks * ITEM
    places = [-(-flags // ALIGNMENT) * ALIGNMENT]
    for bucket in buckets:
        places.append(places[-1] + (ranks - 1) * ITEM * apart_of(bucket.count, ranks))
    return places


def peer_sums(
    communicator: NcclCommunicator, operators: Operators, sync: CudaBuffer, buckets: Sequence[CudaBuffer]
) -> PeerSums | str:
    """The sums of these parts of `sync`, or why there are none. Collective."""
    device = communicator.device
    if sync.size < _SMALLEST:
        return "the model is small"
    post = device.allocate(max(places_of(buckets, communicator.world_size)[-1], _SMALLEST), np.uint8)
    memory = connect(communicator.below, device, [sync.pointer, post.pointer])
    if isinstance(memory, str):
        return memory
    return PeerSums(communicator, device, operators, memory, sync.pointer, buckets, post)
