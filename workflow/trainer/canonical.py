"""A divided model's state in the canonical form of checkpoints, in which rank r of the world has `layout.share` r.

Each rank keeps a share of every canonical buffer. `gather` fills the shares from the ranks' holdings before a save;
`scatter` fills the holdings from the shares after a load. Both are collective over the world. They copy and never
compute, so that a state has the same bits under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import share
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.runs import Runs, put, take

PIECE = 1 << 20
"""Elements per message; one sent and one received message are in memory at a time."""
PARAMETERS = "parameters"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Exchange:
    """The elements of one buffer that go between two ranks; the same on both of them. Pure."""

    division: Division
    trained: bool
    """Whether the buffer contains trained elements only, as moments do."""
    sharded: bool
    """Whether a rank holds only its share, over the replicas, of its local buffer (ZeRO)."""

    @property
    def count(self) -> int:
        """Number of elements in the whole canonical buffer."""
        return self.division.whole.trained if self.trained else self.division.whole.size

    def share(self, rank: int) -> tuple[int, int]:
        """The elements of the canonical buffer that a rank saves."""
        return share(self.count, rank, self.division.grid.world_size)

    def held(self, rank: int) -> tuple[int, int]:
        """The elements of its local buffer that a rank holds."""
        return self._own(rank) if self.sharded else (0, self._local(rank))

    def gathered(self, holder: int, saver: int) -> Runs:
        """What a rank that holds elements sends to the one that saves them. The replicas divide that among them."""
        return self._runs(holder, saver, counted=True).within_local(*self._own(holder))

    def scattered(self, saver: int, holder: int) -> Runs:
        """What a rank that has loaded elements sends to one that holds them."""
        return self._runs(holder, saver, counted=False).within_local(*self.held(holder))

    def _runs(self, holder: int, saver: int, *, counted: bool) -> Runs:
        number = self.division.number(self.division.grid.place(holder))
        return self.division.runs(number, *self.share(saver), trained=self.trained, counted=counted)

    def _local(self, rank: int) -> int:
        index = self.division.of(self.division.grid.place(rank)).index
        return index.trained if self.trained else index.size

    def _own(self, rank: int) -> tuple[int, int]:
        return share(self._local(rank), self.division.grid.place(rank).data, self.division.grid.data)


class CanonicalState:
    """This rank's shares of the canonical buffers.

    `world`: all ranks of the division's grid. `local`: what this rank holds, by name: `parameters`, and buffers of
    trained elements. A `Shard` is this rank's `layout.share` over the replicas.
    """

    def __init__(self, division: Division, world: Communicator, local: Mapping[str, Buffer | Shard]) -> None:
        self._world, self._local = world, local
        self._exchanges = {
            name: Exchange(division, name != PARAMETERS, isinstance(buffer, Shard)) for name, buffer in local.items()
        }
        self.shares: dict[str, Shard] = {}
        """By name; the same objects as long as this object lives."""
        for name, exchange in self._exchanges.items():
            start, stop = exchange.share(world.rank)
            self.shares[name] = Shard(HostBuffer(np.zeros(stop - start, local[name].dtype)), start, exchange.count)

    def gather(self, names: Collection[str] | None = None) -> None:
        """Fill the shares from the ranks' holdings: the named buffers, or all."""
        me = self._world.rank
        for name, exchange in self._exchanges.items():
            if names is not None and name not in names:
                continue
            holding, saved = _Memory.of(self._local[name]), _Memory.of(self.shares[name])
            outgoing, incoming = partial(exchange.gathered, me), partial(exchange.gathered, saver=me)
            swap(self._world, outgoing, incoming, holding.local, saved.to_whole)

    def scatter(self) -> None:
        """Fill the ranks' holdings from the shares."""
        me = self._world.rank
        for name, exchange in self._exchanges.items():
            holding, saved = _Memory.of(self._local[name]), _Memory.of(self.shares[name])
            outgoing, incoming = partial(exchange.scattered, me), partial(exchange.scattered, holder=me)
            swap(self._world, outgoing, incoming, saved.whole, holding.to_local)
            holding.done()


def swap(
    world: Communicator,
    outgoing: Callable[[int], Runs],
    incoming: Callable[[int], Runs],
    read: Callable[[Runs], Array],
    write: Callable[[Runs, Array], None],
) -> None:
    """Exchange elements with every other rank, piece by piece; collective.

    `outgoing`, `incoming`: runs to send to, and to receive from, each rank: the same runs on both ranks. `read`,
    `write`: return the values of a piece of the runs; store received values.
    """
    rank, ranks = world.rank, world.world_size
    for piece in outgoing(rank).pieces(PIECE):
        write(piece, read(piece))
    # All ranks exchange at the same distance, or wait for one that is not there yet: no deadlock.
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        for sent, received in zip_longest(outgoing(to).pieces(PIECE), incoming(source).pieces(PIECE)):
            arriving, requests = None, []
            if received is not None:
                arriving = np.empty(received.count, np.float32)
                requests.append(world.start_receive(HostBuffer(arriving), source))
            if sent is not None:
                requests.append(world.start_send(HostBuffer(read(sent)), to))
            for request in requests:
                request.wait()
            if received is not None and arriving is not None:
                write(received, arriving)


@dataclass(frozen=True)
class _Memory:
    """A rank's piece of a buffer, as an array on the host."""

    array: Array
    start: int
    """Offset of its first element in the buffer."""
    source: Buffer

    @classmethod
    def of(cls, buffer: Buffer | Shard) -> _Memory:
        source, start = (buffer.part, buffer.start) if isinstance(buffer, Shard) else (buffer, 0)
        return cls(source.array if isinstance(source, HostBuffer) else source.read(), start, source)

    def whole(self, runs: Runs) -> Array:
        return take(self.array, runs.whole - self.start, runs.length)

    def local(self, runs: Runs) -> Array:
        return take(self.array, runs.local - self.start, runs.length)

    def to_whole(self, runs: Runs, values: Array) -> None:
        put(self.array, runs.whole - self.start, runs.length, values)

    def to_local(self, runs: Runs, values: Array) -> None:
        put(self.array, runs.local - self.start, runs.length, values)

    def done(self) -> None:
        """Copy to the device what was written here."""
        if not isinstance(self.source, HostBuffer):
            self.source.write(self.array)
