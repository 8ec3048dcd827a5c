"""Collectives over the ranks' GPUs with NCCL, on the stream of each rank's device. Everything else uses MPI.

If a rank dies, its process manager ends the others, as without NCCL. If that fails, or if ranks cannot reach each
other, every call has a time limit: see `nccl_watch`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ortflow.workflow.comm import Communicator, Link, Request
from ortflow.workflow.comm.nccl_library import (
    BFLOAT16,
    BYTE,
    GRAPH_COLLECTIVES,
    IN_PROGRESS,
    SUM,
    TYPES,
    Config,
    NcclError,
    UniqueId,
)
from ortflow.workflow.comm.nccl_links import NcclLink
from ortflow.workflow.comm.nccl_messages import sentence
from ortflow.workflow.comm.nccl_watch import PERIOD, Watch
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.layout import share

BLOCKS_BESIDE = 4
"""Thread blocks of a message's kernel beside passes: each keeps a multiprocessor busy while it waits for the other
rank."""
CONNECT = 300.0
"""Seconds in which ranks that MPI has connected must connect through NCCL, and disconnect."""


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
        self._nccl, self.device = library, device
        self.at_end: list[Callable[[], None]] = []
        """Called when the communicator is aborted, so that nothing waits on the GPU any longer."""
        self._limits = limit, period
        self._subsets: list[NcclCommunicator] = []
        self._links: dict[Link, NcclLink] = {}
        self._world = ctypes.c_void_p()
        self._watch: Watch | None = None
        self._beside: tuple[int, int, int] | None = None
        """The stream for sums beside the device's, and the events that fork and join the two."""
        unique = UniqueId()
        trouble = None
        if below.rank == 0:
            try:
                self._check("ncclGetUniqueId", int(library.ncclGetUniqueId(ctypes.byref(unique))))
            except NcclError as error:
                trouble = str(error)
        shared, trouble = below.broadcast_object((bytes(unique), trouble))
        if trouble is not None:
            raise NcclError(trouble)
        self._limit = CONNECT if limit is None else min(limit, CONNECT)
        library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(Config),
        ]  # fmt: skip
        unique, config = UniqueId.from_buffer_copy(shared), Config.blocking_calls(most_blocks)
        self._within_limit(
            "ncclCommInitRankConfig", ctypes.byref(self._world), below.world_size, unique, below.rank,
            ctypes.byref(config),
        )  # fmt: skip
        self._watch = Watch(device, self._fault, self._end, limit, period)
        device.after_wait.append(self._well)

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().all_reduce(buffer)
            return
        self._well()
        self._sum(buffer, self.device.stream)
        self.watch()

    def reduce_scatter(self, buffer: Buffer) -> None:
        """Sum over the ranks of this rank's share, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().reduce_scatter(buffer)
            return
        if self._even(buffer):
            target, _, count, kind = _place(self._shares(buffer)[self.rank])
            self._queue([("ncclReduceScatter", ctypes.c_void_p(buffer.pointer), target, count, kind, SUM)])
            return
        self._queue([("ncclReduce", *_place(part), SUM, root) for root, part in self._shares(buffer).items()])

    def all_gather(self, buffer: Buffer) -> None:
        """Every rank's share, on every rank, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().all_gather(buffer)
            return
        if self._even(buffer):
            source, _, count, kind = _place(self._shares(buffer)[self.rank])
            self._queue([("ncclAllGather", source, ctypes.c_void_p(buffer.pointer), count, kind)])
            return
        self._queue([("ncclBroadcast", *_place(part), root) for root, part in self._shares(buffer).items()])

    def collect(self, kind: int, source: CudaBuffer, target: CudaBuffer, *, bfloat16: bool = False) -> None:
        """Queue a collective of a graph on the device's stream, from one buffer to another.

        May be captured in a CUDA graph; `watch` must be called after each launch. `kind` is
        `ortflow.workflow.graph.ir.collective.Kind`: sum, maximum, all-gather, or reduce-scatter of rows.
        `bfloat16`: the buffers' 16 bits are numbers of this type.
        """
        name, *operation = GRAPH_COLLECTIVES[kind]
        sent, result = ctypes.c_void_p(source.pointer), ctypes.c_void_p(target.pointer)
        count = ctypes.c_size_t(min(source.count, target.count))
        element = BFLOAT16 if bfloat16 else TYPES[source.dtype.name]
        self._on([(name, sent, result, count, element, *operation)], self.device.stream)

    def sum_parts(self, buffers: Sequence[CudaBuffer], gathered: Sequence[tuple[CudaBuffer, CudaBuffer]] = ()) -> None:
        """Queue sums over the ranks, in place, and all-gathers, from a rank's part into the whole, in one launch.

        May be captured; `watch` must be called after each launch.
        """
        calls: list[tuple[Any, ...]] = [("ncclAllReduce", *_place(buffer), SUM) for buffer in buffers]
        for part, gathered_buffer in gathered:
            sent, result = ctypes.c_void_p(part.pointer), ctypes.c_void_p(gathered_buffer.pointer)
            calls.append(("ncclAllGather", sent, result, ctypes.c_size_t(part.size), BYTE))
        self._on(calls, self.device.stream)

    def broadcast_parts(self, parts: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Queue broadcasts on a stream, together. May be captured; `watch` must be called after each launch.

        Parameters
        ----------
        parts
            Address and bytes of each, the same bytes on all ranks, and the rank that has it.
        stream
            The stream.
        """
        calls = []
        for pointer, size, root in parts:
            memory = ctypes.c_void_p(pointer)
            calls.append(("ncclBroadcast", memory, memory, ctypes.c_size_t(size), BYTE, root))
        self._on(calls, stream)

    def reduce_parts(self, parts: Sequence[tuple[int, int, int, int]], stream: int) -> None:
        """Queue sums of fp32 on a stream, together. May be captured; `watch` must be called after each launch.

        Parameters
        ----------
        parts
            Of each the address, that of the sum on the rank that gets it, elements, and that rank.
        stream
            The stream.
        """
        calls = []
        for source, target, count, root in parts:
            sent, result = ctypes.c_void_p(source), ctypes.c_void_p(target)
            calls.append(("ncclReduce", sent, result, ctypes.c_size_t(count), TYPES["float32"], SUM, root))
        self._on(calls, stream)

    def _on(self, calls: Sequence[tuple[Any, ...]], stream: int) -> None:
        """Queue calls on a stream, and watch them unless they are captured."""
        if calls:
            self._queued(calls, stream)
            if not self.device.capturing:
                self.watch(stream)

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of NCCL's over some of the ranks; closed with this one."""
        below = self.below.subset(ranks)
        if below.world_size == 1:
            return SoloCommunicator()
        return self._connected(below)

    def _connected(self, below: Communicator, most_blocks: int | None = None) -> NcclCommunicator:
        subset = NcclCommunicator(
            below, self.device, self._nccl, *self._limits, one_host=self.one_host, most_blocks=most_blocks
        )
        self._subsets.append(subset)
        return subset

    def connect_links(self, links: Iterable[Link], *, during_passes: bool = False) -> None:
        """Connect this rank's links. See the protocol."""
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

    def message(self, name: str, *arguments: Any, stream: int) -> None:
        """Queue a message on a stream, and watch it."""
        self._queued([(name, *arguments)], stream)
        self.watch(stream)

    def _even(self, buffer: CudaBuffer) -> bool:
        """Whether all shares have the same length, as NCCL's reduce-scatter and all-gather require."""
        return 0 < share(buffer.count, 0, self.world_size)[1] * self.world_size == buffer.count

    def _shares(self, buffer: CudaBuffer) -> dict[int, CudaBuffer]:
        """Each rank's share; ranks whose share is empty are left out."""
        spans = {rank: share(buffer.count, rank, self.world_size) for rank in range(self.world_size)}
        return {rank: buffer.slice(start, stop) for rank, (start, stop) in spans.items() if stop > start}

    def _queue(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Queue collectives on the device's stream, and watch them."""
        self._queued(calls, self.device.stream)
        self.watch()

    def _queued(self, calls: Sequence[tuple[Any, ...]], stream: int) -> None:
        """Make calls of NCCL, given by name and arguments, on a stream; several as one group."""
        self._well()
        self.device.here()
        steps = [(*call, self._world, ctypes.c_void_p(stream)) for call in calls]
        if len(calls) > 1:
            steps = [("ncclGroupStart",), *steps, ("ncclGroupEnd",)]
        assert self._watch is not None
        for name, *arguments in steps:
            with self._watch.calling():
                code = int(getattr(self._nccl, name)(*arguments))
            self._well()
            self._check(name, code)

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum over the ranks, in place, after the work queued so far and concurrently with later work.

        Until `join`, the buffer must not be used. May be captured in a CUDA graph; `watch` must be called after each
        launch.
        """
        self._well()
        runtime = self.device.here()
        if self._beside is None:
            self._beside = runtime.urgent_stream(), runtime.event(), runtime.event()
        stream, parted, _ = self._beside
        runtime.record(parted, self.device.stream)
        runtime.after(stream, parted)
        self._sum(buffer, stream)

    def join(self) -> None:
        """Queue later work after all sums that have begun."""
        if self._beside is not None:
            runtime, (stream, _, met) = self.device.here(), self._beside
            runtime.record(met, stream)
            runtime.after(self.device.stream, met)

    def watch(self, stream: int | None = None) -> None:
        """Watch what is queued on a stream, by default the device's: it must not take longer than the limit."""
        self._well()
        assert self._watch is not None
        self._watch.began(stream)

    def _sum(self, buffer: CudaBuffer, stream: int) -> None:
        self._queued([("ncclAllReduce", *_place(buffer), SUM)], stream)

    def abort(self, code: int) -> None:
        """End every rank now."""
        for communicator in self._all():
            communicator._end()
        super().abort(code)

    def close(self) -> None:
        """Disconnect from both."""
        # NCCL waits for every CUDA graph that contains one of its sums.
        self.device.memory_moves()
        self.device.synchronize()
        for communicator in self._all():
            communicator._leave()
        super().close()

    def _all(self) -> list[NcclCommunicator]:
        """This communicator and those that were made of it, which come first."""
        return [*(communicator for subset in self._subsets for communicator in subset._all()), self]

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.device.after_wait.remove(self._well)
        if self._world:
            self._within_limit("ncclCommFinalize", self._world)
            self._nccl.ncclCommDestroy(self._world)

    def _well(self) -> None:
        """Raise the error that ended the communicator, if there is one."""
        if self._watch is not None and self._watch.trouble:
            raise NcclError(self._watch.trouble)

    def _end(self) -> None:
        """Abort the communicator, which ends kernels that wait for other ranks."""
        for end in self.at_end:
            end()
        world, self._world = self._world, ctypes.c_void_p()
        if world:
            self._nccl.ncclCommAbort(world)

    def _state(self) -> int:
        """State of the last call."""
        state = ctypes.c_int()
        code = int(self._nccl.ncclCommGetAsyncError(self._world, ctypes.byref(state)))
        return code or state.value

    def _fault(self) -> str:
        state = self._state()
        return "" if state in (0, IN_PROGRESS) else self._words("an all-reduce", state)

    def _within_limit(self, name: str, *arguments: Any) -> None:
        """A call that waits for the other ranks, in a thread, which is left behind if they do not come."""
        codes: list[int] = []

        def call() -> None:
            self.device.here()
            codes.append(int(getattr(self._nccl, name)(*arguments)))

        thread = threading.Thread(target=call, name=name, daemon=True)
        thread.start()
        thread.join(self._limit)
        if not codes:
            raise NcclError(
                f"{name} of NCCL's took longer than {self._limit:g} s: a rank cannot reach the others; set "
                "NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME to the interface that connects the nodes"
            )
        self._check(name, codes[0])

    def _check(self, name: str, code: int) -> None:
        if code:
            raise NcclError(self._words(name, code))

    def _words(self, name: str, code: int) -> str:
        error = (self._nccl.ncclGetErrorString(code) or b"an unknown error").decode(errors="replace")
        last = (self._nccl.ncclGetLastError(self._world or None) or b"").decode(errors="replace")
        return sentence(name, error, last)


def _place(buffer: CudaBuffer) -> tuple[Any, Any, Any, int]:
    """Arguments of a call that works in place: source, target, count and type."""
    memory = ctypes.c_void_p(buffer.pointer)
    return memory, memory, ctypes.c_size_t(buffer.count), TYPES[buffer.dtype.name]
