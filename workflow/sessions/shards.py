"""Who fetches and sends for the nodes `Shards` of a process's sessions: what `kernels/shards.c` calls.

As with collectives, a node runs on the thread that MPI was initialised on, and `Binding.run` raises what was raised.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ortflow.workflow.sessions.collectives import keep_error

Listener = Callable[[int, Sequence[int], Sequence[int]], None]
"""Gets the number of a node, and the addresses of its fp32 inputs and outputs; shapes and tokens are left out."""
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_listeners: dict[int, Listener] = {}


def listen(library: Path, channel: int, listener: Listener) -> None:
    """Let the nodes of a channel call a listener, which replaces the one before.

    Parameters
    ----------
    library
        The library of kernels that the sessions register.
    channel
        As in the nodes.
    listener
        What it raises ends the run.
    """
    _listeners[channel] = listener
    ctypes.CDLL(str(library)).ortflow_listen(_callback)


def forget(channel: int) -> None:
    """Call the channel's listener no more, and hold nothing of it."""
    _listeners.pop(channel, None)


def _run(channel: int, number: int, input_count: int, inputs: Any, output_count: int, outputs: Any) -> int:
    """A node's turn."""
    try:
        _listeners[channel](number, inputs[:input_count], outputs[:output_count])
    except BaseException as error:  # noqa: BLE001 - anything would be lost on its way through C
        keep_error(error)
        return 1
    return 0


_callback = _CALLBACK(_run)
