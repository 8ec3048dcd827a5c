"""Sums gradients over the ranks' GPUs bucket by bucket, while the backward pass computes the others.

Used by the trainer on GPUs. The sums run on a stream beside the pass, and are captured with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.device.capture import Stage
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.cuda import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import LEAST, Bucket, buckets_of, with_buckets
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.session import Sessions

FEWEST = 2
"""Number of buckets from which overlap is possible."""


class Overlap:
    """The sums of a step. `sync` is the gradients, followed by what is summed with them; `buckets` are in the order in
    which the backward pass completes them."""

    def __init__(
        self, communicator: NcclCommunicator, sync: CudaBuffer, trained: int, buckets: Sequence[Bucket]
    ) -> None:
        self._comm = communicator
        # The last piece of the flat gradient is summed with the tail after it: both are complete last.
        self._early = [bucket for bucket in buckets if bucket.stop < trained]
        start = max((bucket.start for bucket in buckets if bucket.stop == trained), default=trained)
        self._buckets = [sync.slice(bucket.start, bucket.stop) for bucket in self._early]
        self._rest = sync.slice(start, sync.count)
        self._numbers = {number: place for place, number in enumerate(_places(buckets, self._early))}
        self._next: int | None = None

    def begin(self) -> None:
        """Called before the backward pass that gives this rank's complete gradient of the step."""
        self._next = 0

    def ready(self, number: int, gradients: Sequence[int]) -> None:
        """See `Operators.on_bucket`. Raises OrtflowError if a gradient does not lie in the flat buffer."""
        place = self._numbers.get(number)
        if self._next is None or place is None:
            return
        buffer = self._buckets[place]
        if place != self._next or not all(buffer.pointer <= each < buffer.pointer + buffer.size for each in gradients):
            raise OrtflowError(f"bucket {number} of the gradient is not where or when it is summed")
        self._comm.begin_all_reduce(buffer)
        self._next += 1

    def finish(self) -> None:
        """Sum the remainder, and queue later work after all sums.

        Without `begin` everything remains: a rank without samples must take part in every sum.
        """
        for buffer in self._buckets[self._next or 0 :]:
            self._comm.begin_all_reduce(buffer)
        self._comm.begin_all_reduce(self._rest)
        self._comm.join()
        self._next = None

    def watch(self) -> None:
        """See NcclCommunicator."""
        self._comm.watch()


class OverRanks:
    """The ranks' agreement on what they capture: see `device.capture`. By MPI, since nothing may wait for the GPU."""

    def __init__(self, communicator: NcclCommunicator) -> None:
        self._comm = communicator.below
        self._counts = HostBuffer(np.zeros(len(Stage), np.float32))

    def least(self, stage: Stage) -> Stage:
        """See `Agreement`."""
        self._counts.fill(0)
        self._counts.array[stage] = 1
        self._comm.all_reduce(self._counts)
        return Stage(int(np.flatnonzero(self._counts.array)[0]))

    def obstacle(self, mine: str) -> str:
        """See `Agreement`."""
        found = self._comm.gather(mine)
        first = next((f"rank {rank} cannot: {each}" for rank, each in enumerate(found or ()) if each), "")
        return str(self._comm.broadcast_object(first))


def _places(all_: Sequence[Bucket], some: Sequence[Bucket]) -> list[int]:
    return [all_.index(each) for each in some]


def overlapped(
    sessions: Sessions, communicator: Communicator, form: onnx.ModelProto, index: FlatIndex
) -> tuple[bytes, list[Bucket]] | None:
    """A training graph's form for GPUs with its buckets, as sessions open it; None if its gradients are summed in one
    piece.
    """
    if not isinstance(communicator, NcclCommunicator) or not communicator.one_host:
        return None
    if sessions.operators is None:
        return None
    model, order = with_buckets(form, buckets_of(index, LEAST))
    return (model.SerializeToString(), order) if len(order) >= FEWEST else None
