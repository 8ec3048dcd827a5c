"""Sums gradients over the ranks' GPUs bucket by bucket, while the backward pass computes the others.

Used by the trainer on GPUs. The sums run on a stream beside the pass, and are captured with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda.operators import Operators, Tensor
from ortflow.workflow.device.capture import Stage
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.cuda import CudaBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.buckets import LEAST, Bucket, buckets_of, with_buckets
from ortflow.workflow.fusion.table_rows import TableRows, with_rows
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.table_exchange import TableExchange

FEWEST = 2
"""Number of buckets from which overlap is possible."""
BLOCKS = 8
"""Thread blocks of a sum beside the backward pass, each of which takes a multiprocessor from it."""


class Overlap:
    """The sums of a step.

    Parameters
    ----------
    communicator
        All ranks: sums what is complete last.
    beside
        The same ranks: sums buckets beside the pass.
    sync
        The gradients, followed by what is summed with them.
    trained
        Number of gradients.
    buckets
        In the order in which the backward pass completes them.
    tables
        Whose rows the ranks exchange.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        beside: NcclCommunicator,
        sync: CudaBuffer,
        trained: int,
        buckets: Sequence[Bucket],
        tables: Sequence[TableExchange] = (),
    ) -> None:
        self._comm, self._beside, self._tables = communicator, beside, tables
        # The last piece of the flat gradient is summed with the tail after it. Beside the sum of the last bucket
        # nothing is left to compute.
        early = [bucket for bucket in buckets if bucket.stop < trained]
        late = [early.pop()] if len(early) > 1 else []
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
        if place != self._next or not all(buffer.pointer <= each < buffer.pointer + buffer.size for each in gradients):
            raise OrtflowError(f"bucket {number} of the gradient is not where or when it is summed")
        self._beside.begin_all_reduce(buffer)
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
            self._beside.begin_all_reduce(buffer)
        for table in self._tables:
            if self._next is None:
                table.put_nothing()
            table.gather()
        self._comm.sum_parts(self._rest)
        self._beside.join()
        for table in self._tables:
            table.add()
        self._next = None

    def watch(self) -> None:
        """See NcclCommunicator."""
        self._beside.watch()
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


@dataclass(frozen=True)
class Overlapped:
    """A training graph with its buckets, as sessions open it."""

    content: bytes
    buckets: Sequence[Bucket]
    rows: Sequence[TableRows]

    def sums(self, communicator: NcclCommunicator, operators: Operators, sync: CudaBuffer, index: FlatIndex) -> Overlap:
        """The sums of its steps. Collective."""
        tables = []
        for each in self.rows:
            entry = index[each.table]
            height, width = entry.tensor.shape
            part = sync.slice(entry.offset, entry.end)
            device = communicator.device
            tables.append(TableExchange(each, communicator, device, operators, part, (height, width)))
        beside = communicator.beside(BLOCKS)
        return Overlap(communicator, beside, sync, index.trained, self.buckets, tables)

    def note(self) -> str:
        """The line of the log."""
        line = f"the gradient is summed over the ranks in {len(self.buckets)} buckets during the backward pass"
        names = ", ".join(dict.fromkeys(each.table for each in self.rows))
        return f"{line}; of {names} the ranks exchange the rows that were looked up" if names else line


def overlapped(
    sessions: Sessions,
    communicator: Communicator,
    form: onnx.ModelProto,
    index: FlatIndex,
    elements: Mapping[str, int],
) -> Overlapped | None:
    """A training graph's form for GPUs with its buckets; None if its gradients are summed in one piece.

    `elements` has the most elements of a graph input in a micro-batch, where they are known.
    """
    if not isinstance(communicator, NcclCommunicator) or not communicator.one_host:
        return None
    if sessions.operators is None:
        return None
    model, rows = with_rows(form, index, elements, communicator.world_size)
    model, order = with_buckets(model, buckets_of(index, LEAST, {each.table for each in rows}))
    return Overlapped(model.SerializeToString(), order, rows) if len(order) >= FEWEST else None
