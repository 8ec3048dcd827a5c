"""Connects the operator `Shards` of the library with Python: by channel, what a node fetches and sends.

Called by trainers whose parameters are sharded. ONNX Runtime calls back on the thread that runs the session, which is
the one that may call MPI.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

Listener = Callable[[int, Sequence[int], Sequence[int]], None]
"""Gets the number of a node, and the addresses of its fp32 inputs and outputs, shapes and tokens left out."""
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_listeners: dict[int, Listener] = {}
_fault: list[BaseException] = []


def _called(channel: int, number: int, given: int, inputs: object, made: int, outputs: object) -> int:
    try:
        _listeners[channel](number, inputs[:given], outputs[:made])  # type: ignore[index]
    except BaseException as error:  # noqa: BLE001 - nothing may be raised through C
        _fault.append(error)
        return 1
    return 0


_callback = _CALLBACK(_called)


def listen(library: Path, channel: int, listener: Listener) -> None:
    """Have a listener called for the nodes of a channel; it replaces the one before."""
    _listeners[channel] = listener
    ctypes.CDLL(str(library)).ortflow_listen(_callback)


def forget(channel: int) -> None:
    """Call the channel's listener no more, and hold nothing of it."""
    _listeners.pop(channel, None)


def raise_fault() -> None:
    """Raise what the last listener raised, if anything: ONNX Runtime only says that a node failed."""
    if _fault:
        error = _fault.pop()
        _fault.clear()
        raise error
