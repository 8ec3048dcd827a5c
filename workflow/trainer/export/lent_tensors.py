"""The tensors of a model whose elements are divided over the ranks, one at a time on rank 0.

Rank 0 reads a tensor by its name, which tells the others to send their elements of it. Meanwhile they `lend`. No rank
needs memory for more than a tensor beside what it holds. Used for exports by trainers whose rank 0 lacks parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.layout import Entry, FlatIndex

PIECE = 1 << 20
"""Elements per message."""
Range = tuple[int, int]


class LentTensors(Mapping[str, "npt.NDArray[Any]"]):
    """See the module.

    `ranges_of`: the elements of the buffer that a rank sends. The ranges of all ranks cover each tensor once. `local`:
    this rank's elements, fp32.
    """

    def __init__(
        self, world: Communicator, index: FlatIndex, ranges_of: Callable[[int], Sequence[Range]], local: Sliced
    ) -> None:
        self._world, self._index, self._ranges_of, self._local = world, index, ranges_of, local

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The whole tensor. On rank 0, while all others `lend`."""
        entry = self._index[name]
        self._world.broadcast_object(name)
        values = np.empty(entry.tensor.count, np.float32)
        for rank in range(self._world.world_size):
            for start, stop in self.pieces_of(entry, rank):
                into = values[start - entry.offset : stop - entry.offset]
                if rank == self._world.rank:
                    self._local.slice(start, stop).read(into)
                else:
                    self._world.receive(HostBuffer(into), rank)
        return values.reshape(entry.tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._index)

    def __len__(self) -> int:
        return len(self._index)

    def lend(self) -> None:
        """Send rank 0 what it reads, until it calls `end`. On every other rank."""
        while (name := self._world.broadcast_object(None)) is not None:
            for start, stop in self.pieces_of(self._index[name], self._world.rank):
                self._world.send(self._local.slice(start, stop), 0)

    def end(self) -> None:
        """Let the other ranks go on. On rank 0."""
        self._world.broadcast_object(None)

    def pieces_of(self, entry: Entry, rank: int) -> Iterator[Range]:
        """Ranges of a tensor that a rank holds, each of at most PIECE elements."""
        for first, last in self._ranges_of(rank):
            last = min(last, entry.end)
            for start in range(max(first, entry.offset), last, PIECE):
                yield start, min(start + PIECE, last)
