"""Fetches parameters for the nodes that need them, one layer ahead, and reduces gradients to the ranks that hold them.

Each rank holds its `layout.share` of the trained parameters and of their gradients. Used by the trainer of ZeRO's stage
3, with the program that `with_exchange` made for each graph. Every rank performs every step of a program, in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.shards.program import Fetch, Program, Send, largest
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.parallel.pieces import Piece, batches, pieces_of
from ortflow.workflow.sessions.shards import forget, listen

MESSAGE = 1 << 20
"""Elements per message of gradients, which are copied beside the tensors."""
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Step:
    """A step of a program, and where its elements are."""

    step: Fetch | Send
    sizes: Sequence[int]
    """Elements of each tensor."""
    pieces: Sequence[Piece]
    """Ordered by rank."""
    counts: Sequence[int]
    """Elements that each rank holds."""


class Exchange:
    """Shares of all ranks, and the messages in progress between them.

    `index`: positions of tensors in the flat buffer. `parameters`, `gradients`: this rank's share; gradients are added
    to it. `library`: the kernels of the nodes that exchange.
    """

    def __init__(
        self, communicator: Communicator, index: FlatIndex, parameters: Shard, gradients: Shard, library: Path
    ) -> None:
        self._comm, self._index, self._parameters, self._gradients = communicator, index, parameters, gradients
        self._library = library
        self._steps: dict[int, list[_Step]] = {}
        self._arriving = HostBuffer(np.empty(0, np.float32))
        self._message = np.empty(0, np.float32)
        self._under_way: tuple[int, int, Request] | None = None
        self.fetched = self.sent = 0
        """Elements so far, equal on every rank."""

    def add(self, channel: int, program: Program, *, accumulated: bool = False) -> None:
        """Serve the graph of a channel."""
        steps = []
        for step in program:
            entries = [self._index[name] for name in step.tensors]
            pieces = pieces_of(entries, self._parameters.count, self._comm.world_size)
            counts = [0] * self._comm.world_size
            for piece in pieces:
                counts[piece.rank] += piece.count
            steps.append(_Step(step, [entry.tensor.count for entry in entries], pieces, counts))
        self._steps[channel] = steps
        elements = {entry.name: entry.tensor.count for entry in self._index}
        fetched, sent = largest(program, elements, Fetch), min(largest(program, elements, Send), MESSAGE)
        if fetched > self._arriving.count:
            self._arriving = HostBuffer(np.empty(fetched, np.float32))
        if sent > self._message.size:
            self._message = np.empty(sent, np.float32)
        listen(self._library, channel, lambda number, inputs, outputs: self.run(channel, number, inputs, outputs))

    def drop(self, channel: int) -> None:
        """Serve the graph of a channel no more."""
        self._steps.pop(channel, None)
        forget(channel)

    def begin_pass(self, *, fresh: bool) -> None:
        """Called before a pass. `fresh` gradients replace those of the share; others are added to them."""
        if fresh:
            self._gradients.part.fill(0)

    def end_pass(self) -> None:
        """Called behind a pass: a node has exchanged all that it should when it ends."""

    def watch(self) -> None:
        """Called behind a pass: messages have time limits of their own."""

    @property
    def buffered(self) -> int:
        """Number of elements in the message buffers."""
        return self._arriving.count + self._message.size

    def run(self, channel: int, number: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Perform a step for a node, whose fp32 inputs and outputs lie at these addresses."""
        step = self._steps[channel][number]
        if isinstance(step.step, Fetch):
            self._fetch(channel, number, [memory_at(*place) for place in zip(outputs, step.sizes, strict=True)])
        else:
            self._send(step, [memory_at(*place) for place in zip(inputs, step.sizes, strict=True)])

    def take_part(self, channel: int) -> None:
        """Perform all steps of a program without its graph: discards what is fetched, and sends zero gradients."""
        for number, step in enumerate(self._steps[channel]):
            if isinstance(step.step, Fetch):
                self._fetch(channel, number, None)
            else:
                self._send(step, None)

    def _fetch(self, channel: int, number: int, tensors: Sequence[Array] | None) -> None:
        if self._under_way is None or self._under_way[:2] != (channel, number):
            self._begin(channel, number)
        assert self._under_way is not None
        self._under_way[2].wait()
        self._under_way = None
        step, place = self._steps[channel][number], 0
        self.fetched += sum(step.counts)
        for piece in step.pieces:
            if tensors is not None:
                tensors[piece.tensor][piece.start : piece.stop] = self._arriving.array[place : place + piece.count]
            place += piece.count
        following = range(number + 1, len(self._steps[channel]))
        ahead = next((later for later in following if isinstance(self._steps[channel][later].step, Fetch)), None)
        if ahead is not None:
            self._begin(channel, ahead)

    def _begin(self, channel: int, number: int) -> None:
        step = self._steps[channel][number]
        place = 0
        for piece in step.pieces:
            if piece.rank == self._comm.rank:
                self._arriving.array[place : place + piece.count] = self._own(self._parameters, piece)
            place += piece.count
        request = self._comm.start_gather(self._arriving.slice(0, place), step.counts)
        self._under_way = channel, number, request

    def _send(self, step: _Step, tensors: Sequence[Array] | None) -> None:
        self.sent += sum(step.counts)
        for batch in batches(step.pieces, MESSAGE):
            message = self._message[: sum(piece.count for piece in batch)]
            place = 0
            for piece in batch:
                values = 0 if tensors is None else tensors[piece.tensor][piece.start : piece.stop]
                message[place : place + piece.count] = values
                place += piece.count
            self._comm.reduce(HostBuffer(message), batch[0].rank)
            if batch[0].rank != self._comm.rank:
                continue
            place = 0
            for piece in batch:
                gradient = self._own(self._gradients, piece)
                with np.errstate(invalid="ignore", over="ignore"):
                    np.add(gradient, message[place : place + piece.count], out=gradient)
                place += piece.count

    @staticmethod
    def _own(shard: Shard, piece: Piece) -> Array:
        part = shard.slice(piece.offset, piece.offset + piece.count)
        assert isinstance(part, HostBuffer)
        return part.array


def memory_at(address: int, count: int) -> Array:
    """The memory of an ONNX Runtime tensor, as an array."""
    if not count:
        return np.empty(0, np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
