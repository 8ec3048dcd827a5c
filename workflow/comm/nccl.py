"""Collectives over the ranks' GPUs with NCCL, on the stream of each rank's device. Everything else uses MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ortflow.workflow.comm import Communicator, Link, Request, nccl_calls
from ortflow.workflow.comm.nccl_connection import NcclConnection
from ortflow.workflow.comm.nccl_links import NcclLink
from ortflow.workflow.comm.nccl_watch import PERIOD
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer

BLOCKS_BESIDE = 4
"""Thread blocks of a message's kernel beside passes: each keeps a multiprocessor busy while it waits for the other
rank."""


class NcclCommunicator(StagedCommunicator):
    """The ranks of `below`, each with its own GPU. Collective: all ranks construct it together.

    An all-reduce that takes longer than `limit` seconds ends in an error, which is checked for every `period` seconds.
    `one_host`: all ranks are on one machine. `most_blocks`: see `Config`.
    """

    def __init__(
        self,
        below: Communicator,
        device: CudaDevice,
        library: Any,
        limit: float | None = None,
        period: float = PERIOD,
        *,
        one_host: bool = True,
        most_blocks: int | None = None,
    ) -> None:
        super().__init__(below)
        self.one_host = one_host
        """Over the network, NCCL's collectives call functions on the host, which a captured step must not."""
        self._library, self.device, self._limits = library, device, (limit, period)
        self._subsets: list[NcclCommunicator] = []
        self._links: dict[Link, NcclLink] = {}
        self._concurrent: tuple[int, int, int] | None = None
        """The stream for sums beside the device's, and the events that fork and join the two."""
        self.connection = NcclConnection(below, device, library, limit, period, most_blocks)

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().all_reduce(buffer)
            return
        self._queue(nccl_calls.sums([buffer]))

    def reduce_scatter(self, buffer: Buffer) -> None:
        """Sum over the ranks of this rank's share, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().reduce_scatter(buffer)
            return
        self._queue(nccl_calls.scatter(buffer, self.rank, self.world_size))

    def all_gather(self, buffer: Buffer) -> None:
        """Every rank's share, on every rank, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().all_gather(buffer)
            return
        self._queue(nccl_calls.gather(buffer, self.rank, self.world_size))

    def collect(self, kind: int, source: CudaBuffer, target: CudaBuffer, *, bfloat16: bool = False) -> None:
        """Queue a collective of a graph on the device's stream, from one buffer to another.

        May be captured in a CUDA graph; `watch` must be called after each launch. `kind` is
        `ortflow.workflow.graph.ir.collective.Kind`: sum, maximum, all-gather, or reduce-scatter of rows.
        `bfloat16`: the buffers' 16 bits are numbers of this type.
        """
        self._on([nccl_calls.of_graph(kind, source, target, bfloat16=bfloat16)], self.device.stream)

    def sum_parts(self, buffers: Sequence[CudaBuffer], gathered: Sequence[tuple[CudaBuffer, CudaBuffer]] = ()) -> None:
        """Queue sums over the ranks, in place, and all-gathers, from a rank's part into the whole, in one launch.

        May be captured; `watch` must be called after each launch.
        """
        self._on([*nccl_calls.sums(buffers), *nccl_calls.gathers(gathered)], self.device.stream)

    def broadcast_parts(self, parts: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue broadcasts on a stream, together. May be captured; `watch` must be called after each launch.

        Parameters
        ----------
        parts
            Address and bytes of each, the same bytes on all ranks, and the rank that has it.
        stream
            The stream.
        """
        self._on(nccl_calls.broadcasts(parts), stream)

    def reduce_parts(self, parts: Sequence[tuple[int, int, int, int]], stream: int) -> None:
        """Queue sums of fp32 on a stream, together. May be captured; `watch` must be called after each launch.

        Parameters
        ----------
        parts
            Of each the address, that of the sum on the rank that gets it, elements, and that rank.
        stream
            The stream.
        """
        self._on(nccl_calls.reductions(parts), stream)

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum over the ranks, in place, after the work queued so far and concurrently with later work.

        Until `join`, the buffer must not be used. May be captured in a CUDA graph; `watch` must be called after each
        launch.
        """
        self.connection.raise_trouble()
        runtime = self.device.here()
        if self._concurrent is None:
            self._concurrent = runtime.urgent_stream(), runtime.event(), runtime.event()
        stream, parted, _ = self._concurrent
        runtime.record(parted, self.device.stream)
        runtime.after(stream, parted)
        self.connection.queue(nccl_calls.sums([buffer]), stream)

    def join(self) -> None:
        """Queue later work after all sums that have begun."""
        if self._concurrent is not None:
            runtime, (stream, _, met) = self.device.here(), self._concurrent
            runtime.record(met, stream)
            runtime.after(self.device.stream, met)

    def watch(self, stream: int | None = None) -> None:
        """Watch what is queued on a stream, by default the device's: it must not take longer than the limit."""
        self.connection.watch(self.device.stream if stream is None else stream)

    def _queue(self, calls: Sequence[nccl_calls.Call]) -> None:
        """Queue collectives on the device's stream, and watch them."""
        self.connection.queue(calls, self.device.stream)
        self.watch()

    def _on(self, calls: Sequence[nccl_calls.Call], stream: int) -> None:
        """Queue calls on a stream, and watch them unless they are captured."""
        if calls:
            self.connection.queue(calls, stream)
            # An event that is recorded in a capture belongs to the graph, and the watch could not query it.
            if not self.device.capturing:
                self.watch(stream)

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of NCCL's over some of the ranks; closed with this one."""
        below = self.below.subset(ranks)
        if below.world_size == 1:
            return SoloCommunicator()
        return self._connected(below)

    def _connected(self, below: Communicator, most_blocks: int | None = None) -> NcclCommunicator:
        # Connected anew: splitting the communicator (ncclCommSplit) fails in NCCL 2.28.
        subset = NcclCommunicator(
            below, self.device, self._library, *self._limits, one_host=self.one_host, most_blocks=most_blocks
        )
        self._subsets.append(subset)
        return subset

    def connect_links(self, links: Iterable[Link], *, during_passes: bool = False) -> None:
        """Connect this rank's links. See the protocol."""
        # In one order on both ranks: to connect a link waits for the other rank.
        for link in sorted(set(links).difference(self._links)):
            source, to, _ = link
            if self.rank in (source, to):
                pair = self._connected(self.below.subset([source, to]), BLOCKS_BESIDE if during_passes else None)
                self._links[link] = NcclLink(pair, self.device)

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Begin to send: over the link if there is one, else through host memory."""
        link = self._links.get((self.rank, to, tag))
        if link is None or not isinstance(buffer, CudaBuffer):
            return super().start_send(buffer, to, tag)
        return link.start(buffer)

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Begin to receive, likewise."""
        link = self._links.get((source, self.rank, tag))
        if link is None or not isinstance(buffer, CudaBuffer):
            return super().start_receive(buffer, source, tag)
        return link.start(buffer)

    def abort(self, code: int) -> None:
        """End every rank now."""
        for communicator in self._all():
            communicator.connection.abort()
        super().abort(code)

    def close(self) -> None:
        """Disconnect from both."""
        # NCCL waits for every CUDA graph that contains one of its sums.
        self.device.memory_moves()
        self.device.synchronize()
        for communicator in self._all():
            communicator.connection.close()
        super().close()

    def _all(self) -> list[NcclCommunicator]:
        """This communicator and those that were made of it, which come first."""
        return [*(communicator for subset in self._subsets for communicator in subset._all()), self]
