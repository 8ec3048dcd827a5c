"""The communicators of a process's collective nodes: what `kernels/collective.c` calls.

A node's kernel runs on the thread that runs its session (sessions have no inter-op threads), which is the thread that
MPI was initialised on. What Python raises ends the run, and `Binding.run` raises it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.layout import ALIGNMENT

Array = npt.NDArray[Any]
TYPES: Mapping[int, Any] = {1: np.float32, 7: np.int64, 11: np.float64}
"""As ONNX counts them."""
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64,
)  # fmt: skip
connected: dict[int, Communicator] = {}
"""Channel -> the ranks that its collectives run over; see `connect`."""
_raised = threading.local()


def connect(library: Path, channels: Mapping[int, Communicator]) -> None:
    """Let the collectives of all sessions of this process use these communicators, by channel.

    Parameters
    ----------
    library
        The library of kernels that the sessions register.
    channels
        Added to those connected before; one of the same number is replaced.
    """
    connected.update(channels)
    ctypes.CDLL(str(library)).ortflow_collective_setup(ctypes.cast(_callback, ctypes.c_void_p))


def keep_error(error: BaseException) -> None:
    """Have it raised where this thread's run ends."""
    _raised.error = error


@contextlib.contextmanager
def errors_kept() -> Iterator[None]:
    """Within a node: what is raised here ends the run with this error, not as a batch that the node refuses."""
    try:
        yield
    except BaseException as error:
        keep_error(error)
        raise


def take_error() -> BaseException | None:
    """What a collective raised in this thread's last run; only once."""
    error: BaseException | None = getattr(_raised, "error", None)
    _raised.error = None
    return error


def compute(kind: Kind, source: Array, target: Array, communicator: Communicator) -> None:
    """One collective over flat arrays.

    Parameters
    ----------
    source
        This part's value; unchanged, unless it is `target` itself.
    target
        The result. For the reductions to all it contains `source` already.
    """
    if not source.size or communicator.world_size == 1:
        # Nothing to exchange; a single part's rows are the whole.
        if target.size and kind > Kind.ALL_REDUCE_MAX:
            np.copyto(target, source)
    elif kind == Kind.ALL_REDUCE:
        communicator.all_reduce(HostBuffer(target))
    elif kind == Kind.ALL_REDUCE_MAX:
        np.max(_gathered(source, communicator), axis=0, out=target)
    elif kind == Kind.ALL_GATHER:
        if source.size % ALIGNMENT == 0:
            _rows(target, communicator)[communicator.rank] = source
            communicator.all_gather(HostBuffer(target))
        else:
            _rows(target, communicator)[:] = _gathered(source, communicator)
    elif kind == Kind.REDUCE_SCATTER:
        shares = _padded(_rows(source, communicator))
        communicator.reduce_scatter(HostBuffer(shares.reshape(-1)))
        np.copyto(target, shares[communicator.rank, : target.size])
    else:
        raise OrtflowError(f"a collective of kind {kind!r} has no kernel")


def _rows(array: Array, communicator: Communicator) -> Array:
    """A row for each part."""
    return array.reshape(communicator.world_size, -1)


def _padded(rows: Array) -> Array:
    """A copy whose rows are shares of the flat layout: filled with zeros to its alignment."""
    width = rows.shape[1]
    padded = np.zeros((len(rows), width + -width % ALIGNMENT), rows.dtype)
    padded[:, :width] = rows
    return padded


def _gathered(source: Array, communicator: Communicator) -> Array:
    """Each part's value as a row."""
    world, count = communicator.world_size, source.size
    rows = np.zeros((world, count + -count % ALIGNMENT), source.dtype)
    rows[communicator.rank, :count] = source
    communicator.all_gather(HostBuffer(rows.reshape(-1)))
    return rows[:, :count]


def _array(pointer: int | None, count: int, dtype: Any) -> Array:
    if not count or not pointer:
        return np.empty(0, dtype)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype)


def _run(
    kind: int, channel: int, parts: int, element: int, source: int | None, given_count: int, target: int | None,
    made_count: int, words: int, room: int,
) -> int:  # fmt: skip
    """A node's turn."""
    try:
        communicator = connected.get(channel)
        if communicator is None:
            raise OrtflowError(f"channel {channel} of a collective is not connected")
        if communicator.world_size != parts:
            raise OrtflowError(f"channel {channel} has {communicator.world_size} ranks, and the graph {parts} parts")
        dtype = TYPES[element]
        compute(Kind(kind), _array(source, given_count, dtype), _array(target, made_count, dtype), communicator)
        return 0
    except BaseException as error:  # noqa: BLE001 - anything would be lost on its way through C
        keep_error(error)
        message = f"{type(error).__name__}: {error}".encode()[: room - 1] + b"\0"
        ctypes.memmove(words, message, len(message))
        return 1


_callback = _CALLBACK(_run)
