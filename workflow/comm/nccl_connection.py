"""A connection of ranks through NCCL: opens it, makes calls with it, watches them, and ends it.

Used by `nccl`. If a rank dies, its process manager ends the others, as without NCCL. If that fails, or if ranks cannot
reach each other, every call has a time limit: see `nccl_watch`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl_calls import Call
from ortflow.workflow.comm.nccl_library import IN_PROGRESS, Config, NcclError, UniqueId
from ortflow.workflow.comm.nccl_messages import sentence
from ortflow.workflow.comm.nccl_watch import Watch
from ortflow.workflow.device.cuda import CudaDevice

CONNECT = 300.0
"""Seconds in which ranks that MPI has connected must connect through NCCL, and disconnect."""


class NcclConnection:
    """NCCL's communicator of the ranks of `below`. Collective: all ranks construct it together.

    `limit`, `period`: see `NcclCommunicator`. `most_blocks`: see `Config`.
    """

    def __init__(
        self,
        below: Communicator,
        device: CudaDevice,
        library: Any,
        limit: float | None,
        period: float,
        most_blocks: int | None,
    ) -> None:
        self._library, self._device = library, device
        self.at_end: list[Callable[[], None]] = []
        """Called when the connection is aborted, so that nothing waits on the GPU any longer."""
        self._world = ctypes.c_void_p()
        self._watch: Watch | None = None
        unique = UniqueId()
        trouble = None
        if below.rank == 0:
            try:
                self._check("ncclGetUniqueId", int(library.ncclGetUniqueId(ctypes.byref(unique))))
            except NcclError as error:
                trouble = str(error)
        # An error of rank 0 goes along: the others would wait for ranks that never connect.
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
        self._watch = Watch(device, self._fault, self.abort, limit, period)
        # A kernel that is aborted ends like one that has summed, so that a wait for the GPU does not fail by itself.
        device.after_wait.append(self.raise_trouble)

    def queue(self, calls: Sequence[Call], stream: int) -> None:
        """Make calls on a stream; several as one group."""
        self.raise_trouble()
        self._device.here()
        steps: list[Call] = [(*call, self._world, ctypes.c_void_p(stream)) for call in calls]
        if len(calls) > 1:
            steps = [("ncclGroupStart",), *steps, ("ncclGroupEnd",)]
        assert self._watch is not None
        for name, *arguments in steps:
            with self._watch.calling():
                code = int(getattr(self._library, name)(*arguments))
            # First: where the watch has aborted the call, its code does not say why.
            self.raise_trouble()
            self._check(name, code)

    def watch(self, stream: int) -> None:
        """Watch what is queued on a stream: it must not take longer than the limit."""
        self.raise_trouble()
        assert self._watch is not None
        self._watch.began(stream)

    def raise_trouble(self) -> None:
        """Raise the error that ended the connection, if there is one."""
        if self._watch is not None and self._watch.trouble:
            raise NcclError(self._watch.trouble)

    def abort(self) -> None:
        """End the connection, and with it kernels that wait for other ranks."""
        for end in self.at_end:
            end()
        world, self._world = self._world, ctypes.c_void_p()
        if world:
            self._library.ncclCommAbort(world)

    def close(self) -> None:
        """Disconnect. Collective."""
        if self._watch is not None:
            self._watch.close()
        self._device.after_wait.remove(self.raise_trouble)
        if self._world:
            self._within_limit("ncclCommFinalize", self._world)
            self._library.ncclCommDestroy(self._world)

    def _state(self) -> int:
        """State of the last call."""
        state = ctypes.c_int()
        code = int(self._library.ncclCommGetAsyncError(self._world, ctypes.byref(state)))
        return code or state.value

    def _fault(self) -> str:
        state = self._state()
        return "" if state in (0, IN_PROGRESS) else self._words("an all-reduce", state)

    def _within_limit(self, name: str, *arguments: Any) -> None:
        """A call that waits for the other ranks, in a thread, which is left behind if they do not come."""
        codes: list[int] = []

        def call() -> None:
            self._device.here()
            codes.append(int(getattr(self._library, name)(*arguments)))

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
        error = (self._library.ncclGetErrorString(code) or b"an unknown error").decode(errors="replace")
        last = (self._library.ncclGetLastError(self._world or None) or b"").decode(errors="replace")
        return sentence(name, error, last)
