"""The calls of NCCL that make a collective: names of functions and their arguments. Pure.

Used by `nccl`. `nccl_connection` adds the communicator and the stream, and makes the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from ortflow.workflow.comm.nccl_library import BFLOAT16, BYTE, GRAPH_COLLECTIVES, SUM, TYPES
from ortflow.workflow.device.cuda_buffer import CudaBuffer
from ortflow.workflow.layout import share

Call = tuple[Any, ...]
"""Name of a function, then arguments."""


def sums(buffers: Iterable[CudaBuffer]) -> list[Call]:
    """All-reduces in place."""
    return [("ncclAllReduce", *_in_place(buffer), SUM) for buffer in buffers]


def scatter(buffer: CudaBuffer, rank: int, ranks: int) -> list[Call]:
    """A reduce-scatter in place: rank r gets the sum of its `layout.share`."""
    shares = _shares(buffer, ranks)
    if _is_even(buffer, ranks):
        target, _, count, kind = _in_place(shares[rank])
        return [("ncclReduceScatter", ctypes.c_void_p(buffer.pointer), target, count, kind, SUM)]
    return [("ncclReduce", *_in_place(part), SUM, root) for root, part in shares.items()]


def gather(buffer: CudaBuffer, rank: int, ranks: int) -> list[Call]:
    """An all-gather in place of each rank's `layout.share`."""
    shares = _shares(buffer, ranks)
    if _is_even(buffer, ranks):
        source, _, count, kind = _in_place(shares[rank])
        return [("ncclAllGather", source, ctypes.c_void_p(buffer.pointer), count, kind)]
    return [("ncclBroadcast", *_in_place(part), root) for root, part in shares.items()]


def gathers(parts: Iterable[tuple[CudaBuffer, CudaBuffer]]) -> list[Call]:
    """All-gathers, each from this rank's part into the whole."""
    calls: list[Call] = []
    for part, gathered_buffer in parts:
        sent, result = ctypes.c_void_p(part.pointer), ctypes.c_void_p(gathered_buffer.pointer)
        calls.append(("ncclAllGather", sent, result, ctypes.c_size_t(part.size), BYTE))
    return calls


def of_graph(kind: int, source: CudaBuffer, target: CudaBuffer, *, bfloat16: bool) -> Call:
    """A collective of a graph; see `NcclCommunicator.collect`."""
    name, *operation = GRAPH_COLLECTIVES[kind]
    sent, result = ctypes.c_void_p(source.pointer), ctypes.c_void_p(target.pointer)
    count = ctypes.c_size_t(min(source.count, target.count))
    element = BFLOAT16 if bfloat16 else TYPES[source.dtype.name]
    return (name, sent, result, count, element, *operation)


def broadcasts(parts: Iterable[tuple[int, int, int]]) -> list[Call]:
    """Broadcasts of bytes; see `NcclCommunicator.broadcast_parts`."""
    calls: list[Call] = []
    for pointer, size, root in parts:
        memory = ctypes.c_void_p(pointer)
        calls.append(("ncclBroadcast", memory, memory, ctypes.c_size_t(size), BYTE, root))
    return calls


def reductions(parts: Sequence[tuple[int, int, int, int]]) -> list[Call]:
    """Sums of fp32, each on one rank; see `NcclCommunicator.reduce_parts`."""
    calls: list[Call] = []
    for source, target, count, root in parts:
        sent, result = ctypes.c_void_p(source), ctypes.c_void_p(target)
        calls.append(("ncclReduce", sent, result, ctypes.c_size_t(count), TYPES["float32"], SUM, root))
    return calls


def _is_even(buffer: CudaBuffer, ranks: int) -> bool:
    """Whether all shares have the same length, as NCCL's reduce-scatter and all-gather require."""
    return 0 < share(buffer.count, 0, ranks)[1] * ranks == buffer.count


def _shares(buffer: CudaBuffer, ranks: int) -> dict[int, CudaBuffer]:
    """Each rank's share; ranks whose share is empty are left out."""
    spans = {rank: share(buffer.count, rank, ranks) for rank in range(ranks)}
    return {rank: buffer.slice(start, stop) for rank, (start, stop) in spans.items() if stop > start}


def _in_place(buffer: CudaBuffer) -> tuple[Any, Any, Any, int]:
    """Arguments of a call that works in place: source, target, count and type."""
    memory = ctypes.c_void_p(buffer.pointer)
    return memory, memory, ctypes.c_size_t(buffer.count), TYPES[buffer.dtype.name]
