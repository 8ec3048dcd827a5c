"""What a rank holds of the flat buffers while the gradient is checked, and how its numbers become those of all ranks.

Used by `gradient_check`. Without shards a rank holds everything, and checks alone. With shards (ZeRO's stage 3) every
rank runs the same micro-batch, so that the check needs the memory of a training step. All that the check decides by is
summed over the ranks: they take the same decisions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import TRAINED, FlatIndex

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CheckedTensor:
    """A trained tensor: elements [start, stop) of the rank's buffers, of `count` elements altogether."""

    name: str
    start: int
    stop: int
    count: int


class CheckedPart:
    """All parameters and gradients, on this rank alone.

    Parameters
    ----------
    index
        The tensors.
    parameters, gradients
        Flat buffers; gradients are overwritten by each pass.
    """

    ranks = 1

    def __init__(self, index: FlatIndex, parameters: Buffer, gradients: Buffer) -> None:
        self.parameters, self.gradients, self.size = parameters, gradients, index.trained
        self.tensors: Sequence[CheckedTensor] = _tensors(index, 0, index.trained)

    def totals(self, sums: Sums) -> Sums:
        """The sums over the ranks."""
        return sums

    def agreed(self, number: int) -> int:
        """The number of the first rank."""
        return number

    def passing(self) -> AbstractContextManager[None]:
        """Around each run of a graph."""
        return nullcontext()


class CheckedShard(CheckedPart):
    """A rank's share. Each run of a graph sums the gradients of all ranks, which have the same micro-batch.

    Parameters
    ----------
    index
        The tensors.
    communicator
        The ranks.
    parameters, gradients
        The share.
    around
        What a run needs around it besides: the exchange of shares.
    """

    def __init__(
        self,
        index: FlatIndex,
        communicator: Communicator,
        parameters: Shard,
        gradients: Shard,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(index, parameters.part, gradients.part)
        self.ranks = communicator.world_size
        self.tensors = _tensors(index, parameters.start, parameters.stop)
        self._comm, self._around = communicator, around

    def totals(self, sums: Sums) -> Sums:
        """See above."""
        summed = HostBuffer(np.array(sums, np.float64))
        self._comm.all_reduce(summed)
        found: Sums = summed.array
        return found

    def agreed(self, number: int) -> int:
        """See above."""
        return int(self._comm.broadcast_object(number))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """See above."""
        self.gradients.fill(0)
        with self._around():
            yield
        self.gradients.scale(1 / self.ranks)


def _tensors(index: FlatIndex, start: int, stop: int) -> list[CheckedTensor]:
    """All trained tensors, with the elements of [start, stop) that they have; none of some."""
    found = []
    for entry in index:
        if entry.tensor.group in TRAINED:
            first, last = max(entry.offset, start), min(entry.end, stop)
            here = (first - start, last - start) if first < last else (0, 0)
            found.append(CheckedTensor(entry.name, *here, entry.tensor.count))
    return found
