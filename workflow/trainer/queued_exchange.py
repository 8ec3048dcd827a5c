"""Gathers parameters and reduces gradients with NCCL on a stream beside the graph's, for ZeRO's stage 3 on GPUs.

Nodes of the graph say when (`ortflow.workflow.cuda.shards`). Each rank holds its `layout.share` of the trained fp32
parameters and of their gradients. Nothing waits on the host, so that a pass may be captured as a CUDA graph.

Which order excludes that memory is used too early or too late: ONNX Runtime takes and frees the memory of gathered
parameters and of gradients in the order in which it queues nodes on the graph's stream.

- A gather or a reduction begins behind everything that is queued on the graph's stream (`_part`), and so behind all
  readers and writers of whatever used its memory before.
- The nodes that read parameters read outputs of ShardsReady, which lets the graph's stream wait for the gather.
- Gradients that are being reduced are inputs of the next ShardsSend, which lets the graph's stream wait for the
  reduction. Only then does ONNX Runtime free their memory.
- The reduction writes no memory of ONNX Runtime's: other nodes may read a gradient, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.cuda import shards
from ortflow.workflow.cuda.operators import Operators
from ortflow.workflow.cuda.source import BYTES
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import ALIGNMENT, CudaBuffer
from ortflow.workflow.device.cudart import WITHIN
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.shards.program import Fetch, Program, Send
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.memory import ITEM
from ortflow.workflow.parallel.pieces import Piece, pieces_of
from ortflow.workflow.sessions.collectives import errors_kept


@dataclass(frozen=True)
class Step:
    """A step of a program, and where its elements are."""

    step: Fetch | Send
    sizes: Sequence[int]
    """Bytes of an element of each tensor."""
    counts: Sequence[int]
    """Elements of each tensor."""
    pieces: Sequence[Piece]
    done: int
    """The event behind it."""

    def places(self) -> list[int]:
        """Offsets in bytes at which the tensors fit one behind the other."""
        offsets, place = [], 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            offsets.append(place)
            place += -(-size * count // ALIGNMENT) * ALIGNMENT
        return [*offsets, place]


class QueuedExchange:
    """Shares of all ranks, and the second stream.

    `communicator`: the ranks, each with its own GPU. `parameters`, `gradients`: this rank's share.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: CudaDevice,
        operators: Operators,
        index: FlatIndex,
        parameters: Shard,
        gradients: Shard,
    ) -> None:
        self._nccl = communicator if isinstance(communicator, NcclCommunicator) else None
        if self._nccl is None and communicator.world_size > 1:
            raise UserError(
                "is 3, and ranks on GPUs gather parameters with NCCL, each with a GPU of its own, which is not so here",
                where="parallel.zero",
                fix="give each rank a GPU and install NCCL (pip install 'ortflow[cuda]'), or set it to 2",
            )
        self._rank, self._ranks = communicator.rank, communicator.world_size
        self._device, self._operators, self._index = device, operators, index
        self._parameters, self._gradients = parameters, gradients
        runtime = device.here()
        self._stream = runtime.urgent_stream()
        self._parted, self._met = runtime.event(), runtime.event()
        self._steps: dict[int, list[Step]] = {}
        self._landing: CudaBuffer | None = None
        self._spare: CudaBuffer | None = None
        self._zeros: CudaBuffer | None = None
        self._fresh = True

    def add(self, channel: int, program: Program, *, accumulated: bool = False) -> None:
        """Serve the graph of a channel. `accumulated`: its gradients may be added to those of other micro-batches."""
        runtime, steps = self._device.here(), []
        for step in program:
            entries = [self._index[name] for name in step.tensors]
            kinds = step.kinds if isinstance(step, Fetch) else ()
            sizes = [BYTES[kind] for kind in kinds] or [ITEM] * len(entries)
            pieces = pieces_of(entries, self._parameters.count, self._ranks)
            steps.append(Step(step, sizes, [entry.tensor.count for entry in entries], pieces, runtime.event()))
        self._steps[channel] = steps
        self._operators.shards[channel] = _Channel(self, channel)
        arriving = max((self._own(step) for step in steps if isinstance(step.step, Send)), default=0)
        if accumulated and arriving and self._nccl is not None:
            self._landing = self._device.allocate(arriving, np.float32)

    def drop(self, channel: int) -> None:
        """Serve the graph of a channel no more."""
        self._steps.pop(channel, None)
        self._operators.shards.pop(channel, None)

    @property
    def buffered(self) -> int:
        """Elements of the memory in which further gradients arrive."""
        return self._landing.count if self._landing is not None else 0

    def begin_pass(self, *, fresh: bool) -> None:
        """Called before a pass. `fresh` gradients replace those of the share; others are added to them."""
        self._fresh = fresh

    def end_pass(self) -> None:
        """Queue later work behind everything that was exchanged."""
        runtime = self._device.here()
        runtime.record(self._met, self._stream)
        runtime.after(self._device.stream, self._met)

    def watch(self) -> None:
        """See NcclCommunicator."""
        if self._nccl is not None:
            self._nccl.watch()

    def take_part(self, channel: int) -> None:
        """Perform all steps of a program without its graph: discards what is gathered, and sends zero gradients."""
        steps = self._steps[channel]
        room = max((step.places()[-1] for step in steps if isinstance(step.step, Fetch)), default=0)
        if self._spare is None or self._spare.count < room:
            self._spare = self._device.allocate(room, np.uint8)
        largest = max((max(step.counts) for step in steps if isinstance(step.step, Send)), default=0)
        if self._zeros is None or self._zeros.count < largest:
            self._zeros = self._device.allocate(largest, np.float32)
        for number, step in enumerate(steps):
            if isinstance(step.step, Fetch):
                self.gather(channel, number, [self._spare.pointer + place for place in step.places()])
            else:
                self.reduce(channel, number, [self._zeros.pointer] * len(step.counts))

    def gather(self, channel: int, number: int, addresses: Sequence[int]) -> None:
        """Begin to gather the tensors of a step at these addresses."""
        step, runtime = self._steps[channel][number], self._device.here()
        assert isinstance(step.step, Fetch)
        self._part()
        kinds = step.step.kinds
        for piece in self._mine(step):
            target = addresses[piece.tensor] + piece.start * step.sizes[piece.tensor]
            source = self._pointer(self._parameters, piece)
            shards.rounded(self._operators, runtime, self._stream, target, source, piece.count, kinds[piece.tensor])
        if self._nccl is not None:
            parts = [
                (addresses[piece.tensor] + piece.start * size, piece.count * size, piece.rank)
                for piece in step.pieces
                for size in (step.sizes[piece.tensor],)
            ]
            self._nccl.broadcast_parts(parts, self._stream)
        runtime.record(step.done, self._stream)

    def reduce(self, channel: int, number: int, addresses: Sequence[int]) -> None:
        """Begin to sum the gradients of a step, at these addresses, over the ranks, into the shares."""
        step, runtime = self._steps[channel][number], self._device.here()
        self._part()
        targets, place = {}, 0
        for piece in self._mine(step):
            targets[piece] = self._pointer(self._gradients, piece)
            # NCCL overwrites its target, so that what is to be added arrives elsewhere.
            if not self._fresh and self._landing is not None:
                targets[piece] = self._landing.slice(place, place + piece.count).pointer
                place += piece.count
        if self._nccl is not None:
            parts = [
                (
                    addresses[piece.tensor] + piece.start * ITEM,
                    targets.get(piece, addresses[piece.tensor]),
                    piece.count,
                    piece.rank,
                )
                for piece in step.pieces
            ]
            self._nccl.reduce_parts(parts, self._stream)
        for piece, arrived in targets.items():
            source = arrived if self._nccl is not None else addresses[piece.tensor] + piece.start * ITEM
            target = self._pointer(self._gradients, piece)
            if not self._fresh:
                shards.added(self._operators, self._stream, target, source, piece.count)
            elif source != target:
                runtime.copy(target, source, piece.count * ITEM, WITHIN, self._stream)
        runtime.record(step.done, self._stream)

    def after(self, channel: int, number: int) -> None:
        """Queue later work of the graph behind a step."""
        self._device.here().after(self._device.stream, self._steps[channel][number].done)

    def _part(self) -> None:
        """Let what is queued on the second stream from now on wait for all work of the graph so far."""
        runtime = self._device.here()
        runtime.record(self._parted, self._device.stream)
        runtime.after(self._stream, self._parted)

    def _mine(self, step: Step) -> list[Piece]:
        return [piece for piece in step.pieces if piece.rank == self._rank]

    def _own(self, step: Step) -> int:
        return sum(piece.count for piece in self._mine(step))

    @staticmethod
    def _pointer(shard: Shard, piece: Piece) -> int:
        part = shard.slice(piece.offset, piece.offset + piece.count)
        assert isinstance(part, CudaBuffer)
        return part.pointer


class _Channel:
    """See `ortflow.workflow.cuda.operators.Shards`."""

    def __init__(self, exchange: QueuedExchange, channel: int) -> None:
        self._exchange, self._channel = exchange, channel

    def begin(self, number: int, addresses: Sequence[int]) -> None:
        with errors_kept():
            self._exchange.gather(self._channel, number, addresses)

    def ready(self, number: int) -> None:
        with errors_kept():
            self._exchange.after(self._channel, number)

    def send(self, number: int, addresses: Sequence[int], awaited: int) -> None:
        with errors_kept():
            if addresses:
                self._exchange.reduce(self._channel, number, addresses)
            if awaited >= 0:
                self._exchange.after(self._channel, awaited)
