"""The parameters under ZeRO's stage 3: the trained ones are this rank's `layout.share`, all others are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.layout import FlatIndex, share
from ortflow.workflow.parallel.runs import NOTHING, Runs
from ortflow.workflow.trainer.canonical import swap

Range = tuple[int, int]


@dataclass(frozen=True)
class ShareAndRest:
    """A rank's slice of a flat buffer: its share of the trained elements, and everything after them."""

    shard: Shard
    rest: Buffer

    def slice(self, start: int, stop: int) -> Buffer:
        """See `Sliced`."""
        if start == stop:
            return self.rest.slice(0, 0)
        if start < self.shard.count:
            return self.shard.slice(start, stop)
        return self.rest.slice(start - self.shard.count, stop - self.shard.count)


class ShardedParameters:
    """See the module."""

    def __init__(self, device: Device, index: FlatIndex, ranks: Communicator) -> None:
        self._index, self._ranks = index, ranks
        size, trained = index.size, index.trained
        start, stop = share(trained, ranks.rank, ranks.world_size)
        self.shard = Shard(device.allocate(stop - start, np.float32), start, trained)
        self.here = ShareAndRest(self.shard, device.allocate(size - trained, np.float32))
        if size == trained:
            self.saved = Shard(self.shard.part, start, size)
        else:
            # Shares of all parameters begin at other offsets than those of the trained ones.
            first, last = share(size, ranks.rank, ranks.world_size)
            self.saved = Shard(device.allocate(last - first, np.float32), first, size)

    def load(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """See the protocol."""
        trained, shard = self._index.trained, self.shard
        for entry in self._index:
            start, stop = (max(shard.start, entry.offset), min(shard.stop, entry.end))
            if entry.offset >= trained:
                start, stop = entry.offset, entry.end
            if start < stop:
                values = tensors[entry.name].reshape(-1)
                self.here.slice(start, stop).write(values[start - entry.offset : stop - entry.offset])

    def sent_by(self, rank: int) -> Sequence[Range]:
        """What a rank sends of them for an export."""
        return [self._held_by(rank), *([] if rank else [self._behind])]

    @property
    def _behind(self) -> Range:
        return self._index.trained, self._index.size

    def _saved_by(self, rank: int) -> Range:
        return share(self._index.size, rank, self._ranks.world_size)

    def _held_by(self, rank: int) -> Range:
        return share(self._index.trained, rank, self._ranks.world_size)

    def before_save(self) -> None:
        """See the protocol."""
        if self.saved.part is self.shard.part:
            return
        self._swap(self._held_by, self._saved_by, self.here, self.saved)
        start, stop = max(self._index.trained, self.saved.start), self.saved.stop
        if start < stop:
            self.saved.slice(start, stop).write(self.here.slice(start, stop).read())

    def after_load(self) -> None:
        """See the protocol."""
        if self.saved.part is not self.shard.part:
            self._swap(self._saved_by, self._held_by, self.saved, self.here)
            self._swap(self._saved_by, lambda rank: self._behind, self.saved, self.here)

    def end_training(self) -> None:
        """See the protocol. Nothing is saved behind it."""
        self.saved = self.shard

    def _swap(self, have: Callable[[int], Range], want: Callable[[int], Range], source: Sliced, to: Sliced) -> None:
        """Send elements from the ranks that have them to the ranks that need them."""
        me = self._ranks.rank

        def read(runs: Runs) -> npt.NDArray[np.generic]:
            return source.slice(*_ends(runs)).read()

        def write(runs: Runs, values: npt.NDArray[np.generic]) -> None:
            to.slice(*_ends(runs)).write(values)

        swap(
            self._ranks,
            lambda rank: _common(have(me), want(rank)),
            lambda rank: _common(have(rank), want(me)),
            read,
            write,
        )


def _common(span: Range, other: Range) -> Runs:
    first, last = max(span[0], other[0]), min(span[1], other[1])
    if first >= last:
        return NOTHING
    start = np.array([first], np.int64)
    return Runs(start, start, np.array([last - first], np.int64))


def _ends(runs: Runs) -> Range:
    """Of a single run."""
    start = int(runs.whole[0])
    return start, start + int(runs.length[0])
