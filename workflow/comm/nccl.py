"""Collectives over the ranks' GPUs with NCCL, on the stream of each rank's device. Everything else uses MPI.

If a rank dies, its process manager ends the others, as without NCCL. If that fails, or if ranks cannot reach each
other, every call has a time limit: see `nccl_watch`.
"""

from __future__ import annotations

import ctypes
import glob
import site
from collections.abc import Sequence
from typing import Any

from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl_messages import sentence
from ortflow.workflow.comm.nccl_watch import PERIOD, Watch
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cuda import CudaBuffer, CudaDevice
from ortflow.workflow.errors import CommunicationError

TYPES = {"float32": 7, "float64": 8, "int64": 4}
"""numpy's names -> ncclDataType_t."""
SUM = 0
"""ncclRedOp_t."""


IN_PROGRESS = 7
"""ncclResult_t: a call that continues in the background."""
CONNECT = 300.0
"""Seconds in which ranks that MPI has connected must connect through NCCL."""
LOOK = 0.01
LOOKS, FIRST_LOOK = 100, 20e-6
"""The number of times that a call in the background is polled without a pause, and the first pause in seconds, which
grows up to LOOK. An all-reduce is queued within microseconds; connecting takes seconds.
"""


class NcclError(CommunicationError):
    """An NCCL call that failed."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14. Later versions recognise it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    @classmethod
    def without_blocking(cls) -> Config:
        """Calls do not block."""
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21400, 0)


class NcclCommunicator(StagedCommunicator):
    """The ranks of `below`, each with its own GPU. Collective: all ranks construct it together.

    An all-reduce that takes longer than `limit` seconds ends in an error, which is checked for every `period` seconds.
    `one_host`: all ranks are on one machine.
    """

    def __init__(
        self,
        below: Communicator,
        device: CudaDevice,
        library: Any,
        limit: float | None = None,
        period: float = PERIOD,
        clock: Clock = SYSTEM_CLOCK,
        *,
        one_host: bool = True,
    ) -> None:
        super().__init__(below)
        self.one_host = one_host
        """Over the network, NCCL's collectives call functions on the host, which a captured step must not."""
        self._nccl, self._device, self._clock = library, device, clock
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
        unique, config = UniqueId.from_buffer_copy(shared), Config.without_blocking()
        self._call(
            "ncclCommInitRankConfig", ctypes.byref(self._world), below.world_size, unique, below.rank,
            ctypes.byref(config),
        )  # fmt: skip
        self._watch = Watch(device, self._fault, self._end, limit, period)
        device.after_wait = self._well

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place, after the work queued so far. Does not block."""
        if not isinstance(buffer, CudaBuffer):
            super().all_reduce(buffer)
            return
        self._well()
        self._sum(buffer, self._device.stream)
        self.watch()

    def begin_all_reduce(self, buffer: CudaBuffer) -> None:
        """Sum over the ranks, in place, after the work queued so far and concurrently with later work.

        Until `join`, the buffer must not be used. May be captured in a CUDA graph; `watch` must be called after each
        launch.
        """
        self._well()
        runtime = self._device.here()
        if self._beside is None:
            self._beside = runtime.urgent_stream(), runtime.event(), runtime.event()
        stream, parted, _ = self._beside
        runtime.record(parted, self._device.stream)
        runtime.after(stream, parted)
        self._sum(buffer, stream)

    def join(self) -> None:
        """Queue later work after all sums that have begun."""
        if self._beside is not None:
            runtime, (stream, _, met) = self._device.here(), self._beside
            runtime.record(met, stream)
            runtime.after(self._device.stream, met)

    def watch(self) -> None:
        """Watch the queued sums: from now on they must not take longer than the limit."""
        self._well()
        assert self._watch is not None
        self._watch.began()

    def _sum(self, buffer: CudaBuffer, stream: int) -> None:
        memory, count, kind = ctypes.c_void_p(buffer.pointer), ctypes.c_size_t(buffer.count), TYPES[buffer.dtype.name]
        self._call("ncclAllReduce", memory, memory, count, kind, SUM, self._world, ctypes.c_void_p(stream))

    def abort(self, code: int) -> None:
        """End every rank now."""
        self._end()
        super().abort(code)

    def close(self) -> None:
        """Disconnect from both."""
        # NCCL waits for every CUDA graph that contains one of its sums.
        self._device.memory_moves()
        self._device.synchronize()
        if self._watch is not None:
            self._watch.close()
        self._device.after_wait = None
        if self._world:
            self._call("ncclCommFinalize", self._world)
            self._nccl.ncclCommDestroy(self._world)
        super().close()

    def _well(self) -> None:
        """Raise the error that ended the communicator, if there is one."""
        if self._watch is not None and self._watch.trouble:
            raise NcclError(self._watch.trouble)

    def _end(self) -> None:
        """Abort the communicator, which ends kernels that wait for other ranks."""
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

    def _call(self, name: str, *arguments: Any) -> None:
        code, begun, pause = int(getattr(self._nccl, name)(*arguments)), self._clock.monotonic(), FIRST_LOOK
        for _ in range(LOOKS):
            if code != IN_PROGRESS:
                break
            code = self._state()
        while code == IN_PROGRESS:
            if self._clock.monotonic() - begun > self._limit:
                self._end()
                raise NcclError(
                    f"{name} of NCCL's took longer than {self._limit:g} s: a rank cannot reach the others; set "
                    "NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME to the interface that connects the nodes"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, LOOK)
            self._well()
            code = self._state()
        self._check(name, code)

    def _check(self, name: str, code: int) -> None:
        if code:
            raise NcclError(self._words(name, code))

    def _words(self, name: str, code: int) -> str:
        error = (self._nccl.ncclGetErrorString(code) or b"an unknown error").decode(errors="replace")
        last = (self._nccl.ncclGetLastError(self._world or None) or b"").decode(errors="replace")
        return sentence(name, error, last)


def load() -> Any | None:
    """NCCL as installed by pip, else the system's; None if there is none."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    found = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/nccl/lib/libnccl.so.2")]
    for path in (*found, "libnccl.so.2"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
        return library
    return None


def over_gpus(
    below: Communicator, device: CudaDevice, host: str, limit: float | None = None
) -> tuple[Communicator, str]:
    """The communicator for sums over the ranks' GPUs, and its name for the log. Collective.

    NCCL if each rank has its own GPU and the library is present on all; otherwise host memory and MPI. A sum that takes
    longer than `limit` seconds ends in an error.
    """
    library = load()
    devices: Sequence[tuple[str, str, bool]] | None = below.gather((host, device.gpu.uuid, library is not None))
    devices = below.broadcast_object(devices)
    assert devices is not None
    if len({(host, uuid) for host, uuid, _ in devices}) < len(devices):
        return StagedCommunicator(below), "MPI, because ranks share a GPU"
    if library is None or not all(there for _, _, there in devices):
        return StagedCommunicator(below), "MPI, because NCCL is not installed: pip install 'ortflow[cuda]'"
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    number = version.value
    name = f"NCCL {number // 10000}.{number % 10000 // 100}.{number % 100}"
    one_host = len({each for each, _, _ in devices}) == 1
    return NcclCommunicator(below, device, library, limit, one_host=one_host), name
