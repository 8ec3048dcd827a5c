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
    """What a rank holds; without `over` all parameters and gradients, and no other rank takes part.

    `index`: the tensors. `parameters`, `gradients`: flat buffers of the elements from `start` on; gradients are
    overwritten by each pass. `over`: the ranks that hold the other shares. Each run of a graph sums the gradients of
    all of them, which have the same micro-batch. `exchanging`: what a run needs around it besides: the
    exchange of shares.
    """

    def __init__(
        self,
        index: FlatIndex,
        parameters: Buffer,
        gradients: Buffer,
        *,
        start: int = 0,
        over: Communicator | None = None,
        exchanging: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.parameters, self.gradients, self.size = parameters, gradients, index.trained
        self.ranks = 1 if over is None else over.world_size
        stop = index.trained if over is None else start + parameters.count
        self.tensors: Sequence[CheckedTensor] = _tensors(index, start, stop)
        self._over, self._exchanging = over, exchanging

    def totals(self, sums: Sums) -> Sums:
        """The sums over the ranks."""
        if self._over is None:
            return sums
        summed = HostBuffer(np.array(sums, np.float64))
        self._over.all_reduce(summed)
        totals: Sums = summed.array
        return totals

    def agreed(self, number: int) -> int:
        """The number of the first rank."""
        return number if self._over is None else int(self._over.broadcast_object(number))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around each run of a graph."""
        if self._over is None:
            yield
            return
        self.gradients.fill(0)
        with self._exchanging():
            yield
        self.gradients.scale(1 / self.ranks)


def _tensors(index: FlatIndex, start: int, stop: int) -> list[CheckedTensor]:
    """All trained tensors, with the elements of [start, stop) that they have; none of some."""
    tensors = []
    for entry in index:
        if entry.tensor.group in TRAINED:
            first, last = max(entry.offset, start), min(entry.end, stop)
            span = (first - start, last - start) if first < last else (0, 0)
            tensors.append(CheckedTensor(entry.name, *span, entry.tensor.count))
    return tensors
