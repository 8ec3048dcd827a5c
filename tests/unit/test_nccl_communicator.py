"""A fake NCCL: ranks that never connect, calls that never return, errors that come later."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, fake_device
from waits import PATIENCE, wait_until

from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.nccl_library import NcclError
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cuda import CudaDevice

NOT_READY = 600
WORLD = 4242


class Below(SoloCommunicator):
    """MPI's side of two ranks, seen from rank 0."""

    world_size = 2
    closed: int | None = None

    def broadcast_object(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.closed = 0

    def abort(self, code: int) -> None:
        self.closed = code


class FakeNccl:
    """`states` are what ncclCommGetAsyncError gives, one after the other; the last one repeats."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}
        self.states = [0]
        self.calls: list[str] = []
        self.streams: list[int] = []
        self.last = b""
        self.ncclCommInitRankConfig = Init(self)
        self.stuck: dict[str, threading.Event] = {}
        """Calls that do not return before an event."""

    def code(self, name: str) -> int:
        self.calls.append(name)
        if name in self.stuck:
            assert self.stuck[name].wait(PATIENCE)
        return self.answers.get(name, 0)

    def ncclGetUniqueId(self, place: Any) -> int:  # noqa: N802
        return self.code("ncclGetUniqueId")

    def ncclAllReduce(self, *arguments: Any) -> int:  # noqa: N802
        source, _, count, kind, operation, world, stream = arguments
        assert (kind, operation, world.value) == (7, 0, WORLD)
        self.streams.append(stream.value)
        array = np.ctypeslib.as_array((ctypes.c_float * count.value).from_address(source.value))
        array *= 2
        return self.code("ncclAllReduce")

    def ncclCommGetAsyncError(self, world: Any, place: Any) -> int:  # noqa: N802
        assert world.value == WORLD
        place._obj.value = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return 0

    def ncclCommAbort(self, world: Any) -> int:  # noqa: N802
        assert world.value == WORLD
        return self.code("ncclCommAbort")

    def ncclCommFinalize(self, world: Any) -> int:  # noqa: N802
        return self.code("ncclCommFinalize")

    def ncclCommDestroy(self, world: Any) -> int:  # noqa: N802
        return self.code("ncclCommDestroy")

    def ncclGetErrorString(self, code: int) -> bytes:  # noqa: N802
        return {2: b"unhandled system error", 6: b"remote process exited or there was a network error"}[code]

    def ncclGetLastError(self, world: Any) -> bytes:  # noqa: N802
        return self.last


class Init:
    """ncclCommInitRankConfig."""

    argtypes: Any = None

    def __init__(self, library: FakeNccl) -> None:
        self._library = library

    def __call__(self, place: Any, ranks: int, unique: Any, rank: int, config: Any) -> int:
        assert (ranks, rank, config._obj.blocking, config._obj.magic) == (2, 0, 1, 0xCAFEBEEF)
        assert config._obj.size == ctypes.sizeof(config._obj)
        place._obj.value = WORLD
        return self._library.code("ncclCommInitRankConfig")


communicator = partial(NcclCommunicator, period=0.01)


def limit(world: NcclCommunicator, seconds: float) -> None:
    """From now on: a limit of a moment would also hold for the start, and for the queueing of a sum."""
    assert world.connection._watch is not None
    world.connection._watch._limit = seconds


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(cuda: FakeCuda) -> Iterator[CudaDevice]:
    made = fake_device(cuda)
    yield made
    cuda.failing.clear()


def test_sums_are_queued_and_the_world_is_left_in_order(device: CudaDevice) -> None:
    library, below = FakeNccl(), Below()
    world = communicator(below, device, library, 60)
    buffer = device.allocate(10, np.float32)
    buffer.fill(3)
    world.all_reduce(buffer)
    np.testing.assert_array_equal(buffer.read(), np.full(10, 6, np.float32))
    world.close()
    assert library.calls[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    assert below.closed == 0
    assert "ncclCommAbort" not in library.calls


def test_sums_run_beside_what_is_queued_until_they_are_joined(cuda: FakeCuda, device: CudaDevice) -> None:
    library = FakeNccl()
    world = communicator(Below(), device, library, 60)
    buffer = device.allocate(10, np.float32)
    world.all_reduce(buffer)
    cuda.calls.clear()
    world.begin_all_reduce(buffer)
    world.begin_all_reduce(buffer)
    world.join()
    first, beside, again = library.streams
    assert first == device.stream != beside == again
    events = [call for call in cuda.calls if call[0] in ("cudaEventRecord", "cudaStreamWaitEvent")]
    (_, parted), *_, (_, met) = events
    assert parted != met
    pair = [("cudaEventRecord", parted), ("cudaStreamWaitEvent", parted)]
    assert events == [*pair, *pair, ("cudaEventRecord", met), ("cudaStreamWaitEvent", met)]
    assert (cuda.events[parted], cuda.events[met]) == (device.stream, beside)
    world.close()


def test_the_world_is_left_after_the_graphs_that_sum_in_it(cuda: FakeCuda, device: CudaDevice) -> None:
    """NCCL's Finalize waits until each CUDA graph with one of its sums is gone."""
    library = FakeNccl()
    world = communicator(Below(), device, library, 60)
    forgotten: list[int] = []

    class Work:
        def forget(self) -> None:
            forgotten.append(len(library.calls))

    work = Work()
    device.captured.add(work)
    world.close()
    assert forgotten == [library.calls.index("ncclCommFinalize")]


def test_ranks_that_do_not_find_each_other_are_given_up(device: CudaDevice) -> None:
    library = FakeNccl()
    library.stuck["ncclCommInitRankConfig"] = come = threading.Event()
    with pytest.raises(NcclError, match=r"0\.05 s.*NCCL_SOCKET_IFNAME"):
        communicator(Below(), device, library, 0.05)
    come.set()


def test_a_sum_that_waits_for_a_rank_to_connect_is_ended(device: CudaDevice) -> None:
    """The first sum of a kind connects the ranks, in the call itself."""
    library = FakeNccl()
    world = communicator(Below(), device, library, 60)
    limit(world, 0.05)
    buffer = device.allocate(10, np.float32)
    library.stuck["ncclAllReduce"], library.answers["ncclAllReduce"] = Aborted(library), 6
    with pytest.raises(NcclError, match=r"0\.05 s"):
        world.all_reduce(buffer)
    assert library.calls.count("ncclCommAbort") == 1


class Aborted(threading.Event):
    """NCCL's calls end when the communicator is aborted."""

    def __init__(self, library: FakeNccl) -> None:
        super().__init__()
        self._library = library

    def wait(self, timeout: float | None = None) -> bool:
        wait_until(lambda: "ncclCommAbort" in self._library.calls)
        return True


def test_an_error_of_the_start_is_reported_with_its_cause(device: CudaDevice) -> None:
    library = FakeNccl()
    library.answers = {"ncclCommInitRankConfig": 2}
    library.last = b"Error while creating shared memory segment /dev/shm/nccl-1: No space left on device"
    with pytest.raises(NcclError, match="ncclCommInitRankConfig: /dev/shm is too small or full"):
        communicator(Below(), device, library, 60)


def test_a_sum_that_never_comes_ends_the_wait_with_a_sentence(cuda: FakeCuda, device: CudaDevice) -> None:
    library = FakeNccl()
    world = communicator(Below(), device, library, 60)
    buffer = device.allocate(10, np.float32)
    readback = device.readback(buffer)
    cuda.failing["cudaEventQuery"] = NOT_READY
    world.all_reduce(buffer)
    limit(world, 0.05)
    wait_until(lambda: "ncclCommAbort" in library.calls)
    words = r"within 0\.05 s \(restart\.hung_seconds\).*another rank"
    readback.queue()
    for wait in (buffer.read, readback.read, device.synchronize, lambda: world.all_reduce(buffer)):
        with pytest.raises(NcclError, match=words):
            wait()
    assert library.calls.count("ncclCommAbort") == 1
    below = world.below
    world.abort(1)
    assert isinstance(below, Below)
    assert below.closed == 1
    assert library.calls.count("ncclCommAbort") == 1


def test_an_error_that_comes_later_ends_the_wait(device: CudaDevice) -> None:
    library = FakeNccl()
    world = communicator(Below(), device, library, None)
    buffer = device.allocate(10, np.float32)
    world.all_reduce(buffer)
    library.last = b"socketProgress: Connection closed by remote peer node2<41234>"
    library.states = [6]
    wait_until(lambda: "ncclCommAbort" in library.calls)
    with pytest.raises(NcclError, match="all-reduce"):
        buffer.read()


def test_sums_that_take_their_time_are_waited_for(cuda: FakeCuda, device: CudaDevice) -> None:
    library = FakeNccl()
    world = communicator(Below(), device, library, 60)
    watch = world.connection._watch
    assert watch is not None
    buffer = device.allocate(10, np.float32)
    cuda.failing["cudaEventQuery"] = NOT_READY
    for _ in range(3):
        world.all_reduce(buffer)
    time.sleep(0.1)
    buffer.read()
    del cuda.failing["cudaEventQuery"]
    wait_until(lambda: len(watch._free) == 3)
    world.all_reduce(buffer)
    assert len(cuda.events) == 3, "events are reused"
    world.close()
