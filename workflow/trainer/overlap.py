"""Sums gradients over the ranks' GPUs bucket by bucket, while the backward pass computes the others.

Used by the trainer on GPUs. The sums run on a stream beside the pass, and are captured with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from ortflow.workflow.comm import Communicator, first_of
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.device.capture import Stage
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import LEAST, Bucket, buckets_of, with_buckets, with_small_end
from ortflow.workflow.fusion.table_rows import TableRows, with_rows
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.peer_sums import PeerSums, peer_sums
from ortflow.workflow.trainer.table_exchange import TableExchange

FEWEST = 2
"""Number of buckets from which overlap is possible."""


class Sums(Protocol):
    """Sums over the ranks beside the backward pass: NCCL's, or `peer_sums`."""

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum in place, after the work queued so far and concurrently with later work."""

    def join(self) -> None:
        """Queue later work after all sums that have begun."""


class Overlap:
    """The sums of a step.

    `communicator`: all ranks: sums what is complete last. `bucket_sums`: sums buckets beside the pass. `sync`: the
    gradients, followed by what is summed with them. `buckets`: in the order in which the backward pass completes them.
    `tables`: whose rows the ranks exchange.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        bucket_sums: Sums,
        sync: CudaBuffer,
        trained: int,
        buckets: Sequence[Bucket],
        tables: Sequence[TableExchange] = (),
    ) -> None:
        self._comm, self._bucket_sums, self._tables = communicator, bucket_sums, tables
        early = early_of(buckets, trained)
        # The last piece of the flat gradient is summed with the tail after it.
        late = [bucket for bucket in buckets if bucket not in early and bucket.stop < trained]
        start = max((bucket.start for bucket in buckets if bucket.stop == trained), default=trained)
        self._buckets = [sync.slice(bucket.start, bucket.stop) for bucket in early]
        self._rest = [*(sync.slice(bucket.start, bucket.stop) for bucket in late), sync.slice(start, sync.count)]
        self._numbers = {buckets.index(bucket): place for place, bucket in enumerate(early)}
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
        # In ONNX Runtime's default order, gradients of weights come last: a sum would begin before its bucket is there.
        if place != self._next or not all(
            buffer.pointer <= address < buffer.pointer + buffer.size for address in gradients
        ):
            raise OrtflowError(f"bucket {number} of the gradient is not where or when it is summed")
        self._bucket_sums.begin_all_reduce(buffer)
        self._next += 1

    def rows(self, number: int, indices: Tensor, gradient: Tensor) -> None:
        """See `Operators.on_rows`. Outside of a step, as in a check, a rank adds up its own."""
        table = self._tables[number]
        if self._next is None:
            table.add_these(indices, gradient)
        else:
            table.put(indices, gradient)

    def finish(self) -> None:
        """Sum the remainder, and queue later work after all sums.

        Without `begin` everything remains: a rank without samples must take part in every sum.
        """
        for buffer in self._buckets[self._next or 0 :]:
            self._bucket_sums.begin_all_reduce(buffer)
        for table in self._tables if self._next is None else ():
            table.put_nothing()
        self._comm.sum_parts(self._rest, [part for table in self._tables for part in table.parts])
        self._bucket_sums.join()
        for table in self._tables:
            table.add()
        self._next = None

    def watch(self) -> None:
        """See NcclCommunicator."""
        self._comm.watch()

    def close(self) -> None:
        """Called when no further step is summed. Collective."""
        if isinstance(self._bucket_sums, PeerSums):
            self._bucket_sums.close()


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

    def obstacle(self, own_obstacle: str) -> str:
        """See `Agreement`."""
        return first_of(self._comm, own_obstacle and f"rank {self._comm.rank} cannot: {own_obstacle}") or ""


def early_of(buckets: Sequence[Bucket], trained: int) -> list[Bucket]:
    """The buckets that are summed beside the pass. Beside the sum of the last one nothing is left to compute."""
    early = [bucket for bucket in buckets if bucket.stop < trained]
    return early[:-1] if len(early) > 1 else early


def in_buckets(
    form: onnx.ModelProto, index: FlatIndex, elements: Mapping[str, int], ranks: int
) -> tuple[onnx.ModelProto, list[Bucket], list[TableRows]]:
    """A training graph with its buckets, where copies sum them, and the tables whose rows are exchanged then.

    See `overlapped` for `elements`.
    """
    model, rows = with_rows(form, index, elements, ranks, LEAST)
    buckets = buckets_of(index, LEAST, {table_rows.table for table_rows in rows})
    bucketed, order = with_buckets(model, buckets)
    if last := [bucket for bucket in order if bucket.stop < index.trained][-1:]:
        bucketed, order = with_buckets(model, with_small_end(buckets, last[0], index))
    return bucketed, order, rows


@dataclass(frozen=True)
class Overlapped:
    """A training graph with its buckets, as sessions open it, and their sums."""

    content: bytes
    sums: Overlap
    note: str
    """The line of the log."""


def overlapped(
    sessions: Sessions,
    communicator: Communicator,
    form: onnx.ModelProto,
    index: FlatIndex,
    elements: Mapping[str, int],
    sync: CudaBuffer,
) -> Overlapped | None:
    """A training graph's form for GPUs with its buckets; None if its gradients are summed in one piece. Collective.

    `elements`: the most elements of a graph input in a micro-batch, where they are known. `sync`: the gradients,
    followed by what is summed with them.
    """
    if not isinstance(communicator, NcclCommunicator) or not communicator.one_host:
        return None
    if (operators := sessions.operators) is None:
        return None
    model, order, rows = in_buckets(form, index, elements, communicator.world_size)
    early = [sync.slice(bucket.start, bucket.stop) for bucket in early_of(order, index.trained)]
    bucket_sums: Sums | str = peer_sums(communicator, operators, sync, early) if early else "there is one bucket"
    way = "by copies between the GPUs"
    if isinstance(bucket_sums, str):
        # NCCL's sums take multiprocessors from the pass whenever they run, so that nothing is gained by rows.
        model, order = with_buckets(form, buckets_of(index, LEAST))
        rows, way, bucket_sums = [], f"by NCCL ({bucket_sums})", communicator
    if len(order) < FEWEST:
        return None
    tables = []
    for table_rows in rows:
        entry = index[table_rows.table]
        part, (height, width) = sync.slice(entry.offset, entry.end), entry.tensor.shape
        tables.append(TableExchange(table_rows, communicator, communicator.device, operators, part, (height, width)))
    note = f"the gradient is summed over the ranks in {len(order)} buckets during the backward pass, {way}"
    if names := ", ".join(dict.fromkeys(table_rows.table for table_rows in rows)):
        note += f"; of {names} the ranks exchange the rows that were looked up"
    return Overlapped(
        model.SerializeToString(), Overlap(communicator, bucket_sums, sync, index.trained, order, tables), note
    )
