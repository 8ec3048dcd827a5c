"""Sums by copies between GPUs: every rank has the sum of all, whatever is done late, and none where one cannot."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest
from emulated_cuda import EmulatedCall, Memory, needs_emulation
from fake_cuda import FakeCuda, fake_device
from lazy_cuda import LazyCuda, LazyNccl
from messages import mentions
from thread_nccl import array_at
from thread_wire import on_threads
from waits import PATIENCE

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.peers import PeerMemory, connect
from ortflow.workflow.cuda.peers import PeerKernels
from ortflow.workflow.layout import share
from ortflow.workflow.trainer import peer_sums
from ortflow.workflow.trainer.peer_sums import PeerSums

PLAIN = PeerKernels


def word(address: int) -> Any:
    return ctypes.c_uint32.from_address(address)


class Kernels(PeerKernels):
    """The kernels on the host."""

    pause = 0.0
    """Seconds before a sum on rank 0."""

    def __init__(self, operators: Any, rank: int, ranks: int, step: int) -> None:
        self.cuda, self.rank, self.ranks, self.step = operators, rank, ranks, step

    def next_step(self, stream: int) -> None:
        def do() -> None:
            word(self.step).value += 1

        self.cuda.defer(stream, do)

    def notify(self, stream: int, flags: int, place: int) -> None:
        def do() -> None:
            for rank, address in enumerate(array_at(flags, self.ranks, np.uint64)):
                if rank != self.rank:
                    word(int(address) + 4 * (place * self.ranks + self.rank)).value = word(self.step).value

        self.cuda.defer(stream, do)

    def wait_for(self, stream: int, flags: int, first: int, last: int, stop: int) -> None:
        def do() -> None:
            until = time.monotonic() + PATIENCE
            for place in range(first * self.ranks, last * self.ranks):
                if place % self.ranks == self.rank:
                    continue
                while word(flags + 4 * place).value < word(self.step).value and not word(stop).value:
                    assert time.monotonic() < until, "nobody signals"
                    time.sleep(1e-4)

        self.cuda.defer(stream, do)

    def add_up(self, stream: int, mine: int, others: int, apart: int, count: int) -> None:
        def do() -> None:
            if self.rank == 0:
                time.sleep(self.pause)
            own, given = array_at(mine, count, np.float32), iter(range(self.ranks - 1))
            parts = [
                own.copy() if rank == self.rank else array_at(others + 4 * apart * next(given), count, np.float32)
                for rank in range(self.ranks)
            ]
            own[:] = np.sum(parts, axis=0)

        self.cuda.defer(stream, do)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sums, "PeerKernels", Kernels)
    monkeypatch.setattr(peer_sums, "_SMALLEST", 1)
    monkeypatch.setattr(peer_sums, "LEAST", 1)
    monkeypatch.setattr(peer_sums, "RATE", 0.0)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("ranks", "counts"), [(2, [128, 64, 1000]), (2, [3000, 230]), (3, [640, 70]), (4, [64]), (8, [5, 2000])]
)
def test_every_rank_has_the_sum(ranks: int, counts: list[int], monkeypatch: pytest.MonkeyPatch, *, eager: bool) -> None:
    """Streams do their work as late, or as early, as their order permits. Early, buckets have more parts than a
    receive buffer holds, and rank 0 is the last to read it; late fake streams cannot wait for late ones of others."""
    monkeypatch.setattr(peer_sums, "PART", 256)
    monkeypatch.setattr(peer_sums, "SLOTS", 1 if eager else 100)
    monkeypatch.setattr(Kernels, "pause", 2e-3)
    library = LazyNccl()
    ends = np.cumsum([-(-count // 64) * 64 for count in counts])

    def program(below: Communicator) -> list[int]:
        cuda = LazyCuda(eager=eager)
        library.here(cuda)
        device = fake_device(cuda)
        world = NcclCommunicator(below, device, library)
        sync = device.allocate(int(ends[-1]) + 7, np.float32)
        buckets = [
            sync.slice(int(end - -(-n // 64) * 64), int(end - -(-n // 64) * 64) + n)
            for n, end in zip(counts, ends, strict=True)
        ]
        sums = peer_sums.peer_sums(world, cuda, sync, buckets)  # type: ignore[arg-type]
        assert isinstance(sums, PeerSums)
        for step in range(3):
            values = [
                np.random.default_rng([step, rank]).integers(-9, 9, sync.count).astype("float32")
                for rank in range(ranks)
            ]
            sync.write(values[world.rank])
            expected = values[world.rank].copy()
            for bucket in buckets:
                start = (bucket.pointer - sync.pointer) // 4
                expected[start : start + bucket.count] = np.sum(values, axis=0)[start : start + bucket.count]
            if step == 2 and world.rank == 0:
                time.sleep(0.05)
            for bucket in buckets:
                sums.begin_all_reduce(bucket)
            sums.join()
            np.testing.assert_array_equal(sync.read(), expected)
        sums.close()
        world.close()
        return cuda.opened

    assert on_threads(ranks, program) == [[]] * ranks
    assert not library.calls


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_receive_buffer_has_room_for_every_share_of_its_parts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sums, "PART", 640)
    monkeypatch.setattr(peer_sums, "_SMALLEST", 1)
    monkeypatch.setattr(peer_sums, "LEAST", 4 * 3364)
    device, counts = fake_device(FakeCuda()), (1000, 64, 300, 2000)
    parts = peer_sums.parts_of([device.allocate(count, np.float32) for count in counts])
    assert [part.count for part in parts] == peer_sums.counts_of(counts) == [640, 360, 64, 300, 640, 640, 640, 80]
    largest = max(b - a for part in parts for a, b in (share(part.count, rank, ranks) for rank in range(ranks)))
    assert peer_sums.apart_of([part.count for part in parts], ranks) == largest
    flags = peer_sums.received_size(counts, ranks) - 4 * peer_sums.SLOTS * (ranks - 1) * largest
    assert 0 <= flags - 4 * 2 * len(parts) * ranks < 256
    assert flags % 256 == 0
    assert peer_sums.received_size(counts[1:], ranks) == 0, "so few are NCCL's"


@pytest.mark.parametrize("failing", ["cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"])
def test_what_one_rank_cannot_open_none_does(failing: str) -> None:
    def program(below: Communicator) -> tuple[str, list[int]]:
        cuda = FakeCuda(failing={failing: 217} if below.rank == 1 else None)
        device = fake_device(cuda)
        memory = device.allocate(64, np.float32)
        found = connect(below, device, [memory.pointer])
        assert isinstance(found, str)
        return found, cuda.opened

    answers = on_threads(2, program)
    assert {why for why, _ in answers} == {answers[0][0]}
    assert "error 217" in answers[0][0]
    assert answers[0][1] == []


def test_the_setting_that_forbids_it_for_nccl_does_so_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(below: Communicator) -> PeerMemory | str:
        device = fake_device(FakeCuda())
        memory = device.allocate(64, np.float32)
        return connect(below, device, [memory.pointer])

    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert on_threads(2, program) == ["NCCL_P2P_DISABLE is set"] * 2
    assert on_threads(9, lambda below: program(below))[0] == "NCCL_P2P_DISABLE is set"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert "9 ranks are more than 8" in str(on_threads(9, program)[0])


@pytest.mark.parametrize(
    ("fault", "words"), [("wrong", "gave wrong sums"), ("slow", "GPUs reach"), ("stuck", "did not")]
)
def test_what_fails_in_the_self_test_is_left_to_nccl(fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = LazyNccl()
    if fault == "slow":
        monkeypatch.setattr(peer_sums, "RATE", 1e15)
    monkeypatch.setattr(peer_sums, "PATIENCE", 0.3 if fault == "stuck" else PATIENCE)

    def program(below: Communicator) -> tuple[Any, list[int]]:
        cuda = LazyCuda()
        library.here(cuda)
        device = fake_device(cuda)
        world = NcclCommunicator(below, device, library)
        sync = device.allocate(1000, np.float32)
        if below.rank == 1 and fault != "slow":
            kernels = Kernels(cuda, 1, 2, 0)
            spoiled = {"add_up": "wrong", "notify": "stuck"}
            for name, when in spoiled.items():
                if when == fault:
                    monkeypatch.setattr(Kernels, name, _only_rank_0(getattr(kernels.__class__, name)))
        below.barrier()
        found = peer_sums.peer_sums(world, cuda, sync, [sync.slice(0, 900)])  # type: ignore[arg-type]
        assert not sync.read().any()
        assert not world.connection.at_end
        world.close()
        return found, cuda.opened

    answers = on_threads(2, program)
    assert answers[0] == answers[1]
    assert mentions(answers[0][0], words)
    assert answers[0][1] == []


def _only_rank_0(plain: Any) -> Any:
    def method(self: Kernels, stream: int, *given: int) -> None:
        if self.rank == 0:
            plain(self, stream, *given)

    return method


def test_a_lost_rank_ends_the_wait() -> None:
    """The watch aborts the communicator, and with it what waits on the GPU."""
    library, lost = LazyNccl(), threading.Event()

    def program(below: Communicator) -> float:
        cuda = LazyCuda()
        library.here(cuda)
        device = fake_device(cuda)
        world = NcclCommunicator(below, device, library)
        sync = device.allocate(256, np.float32)
        sums = peer_sums.peer_sums(world, cuda, sync, [sync])  # type: ignore[arg-type]
        assert isinstance(sums, PeerSums), sums
        if world.rank == 1:
            lost.wait(PATIENCE)
            return 0.0
        sums.begin_all_reduce(sync)
        begun = time.monotonic()
        threading.Timer(0.2, world.connection.abort).start()
        sums.join()
        lost.set()
        return time.monotonic() - begun

    waited = on_threads(2, program)[0]
    assert 0.1 < waited < PATIENCE / 2


class Emulated:
    """Operators that run kernels on the processor."""

    def launch(self, text: str, name: str, grid: int, block: int, arguments: Any, stream: int) -> None:
        EmulatedCall([], []).launch(text, name, grid, block, *arguments)


@needs_emulation
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (1, 3), (7, 8)])
@pytest.mark.parametrize("count", [1, 64, 1027, 90_001])
def test_the_kernel_adds_in_the_order_of_ranks(rank: int, ranks: int, count: int) -> None:
    random, apart = np.random.default_rng(count), -(-count // 4) * 4 + 4
    parts = (random.normal(size=(ranks, count)) * 10.0 ** random.integers(-3, 3, (ranks, 1))).astype("float32")
    mine, others = Memory(4 * count), Memory(4 * apart * (ranks - 1))
    mine.content[:] = parts[rank].view(np.uint8)
    for slot, part in enumerate(np.delete(parts, rank, axis=0)):
        others.content[4 * apart * slot : 4 * apart * slot + 4 * count] = part.view(np.uint8)
    kernels = PLAIN(Emulated(), rank, ranks, 0)  # type: ignore[arg-type]
    kernels.add_up(0, mine.pointer, others.pointer, apart, count)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    np.testing.assert_array_equal(mine.content.view(np.float32), expected)
    mine.check()


@needs_emulation
def test_the_kernels_signal_all_others_and_wait_for_them() -> None:
    ranks, rank, places = 3, 1, 4
    numbers, stop = Memory(8 + 8 * ranks), Memory(4)
    flags = [Memory(4 * ranks * places) for _ in range(ranks)]
    for each in (numbers, stop, *flags):
        each.content[:] = 0
    numbers.content[8:].view(np.uint64)[:] = [each.pointer for each in flags]
    kernels = PLAIN(Emulated(), rank, ranks, numbers.pointer)  # type: ignore[arg-type]
    for step in (1, 2):
        kernels.next_step(0)
        kernels.notify(0, numbers.pointer + 8, 2)
        received = [each.content.view(np.uint32).reshape(places, ranks) for each in flags]
        assert [each[2, rank] for each in received] == [step, 0, step]
        assert sum(int(each.sum()) for each in received) == 2 * step
    own = flags[rank].content.view(np.uint32).reshape(places, ranks)
    own[1:3] = [[2, 0, 3], [2, 0, 2]]
    kernels.wait_for(0, flags[rank].pointer, 1, 3, stop.pointer)
    # Rank 0 never signals place 3: only the abort ends this wait.
    stop.content.view(np.uint32)[:] = 1
    kernels.wait_for(0, flags[rank].pointer, 3, 4, stop.pointer)
    # A step number that has come around.
    numbers.content[:4].view(np.uint32)[:] = 0xFFFFFFFF
    own[0] = [1, 0, 0xFFFFFFFF]
    stop.content[:] = 0
    kernels.wait_for(0, flags[rank].pointer, 0, 1, stop.pointer)
    for each in (numbers, stop, *flags):
        each.check()


def test_a_small_model_is_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sums, "LEAST", 4001)
    library = LazyNccl()

    def program(below: Communicator) -> Any:
        cuda = LazyCuda()
        library.here(cuda)
        world = NcclCommunicator(below, fake_device(cuda), library)
        sync = world.device.allocate(1000, np.float32)
        return peer_sums.peer_sums(world, cuda, sync, [sync])  # type: ignore[arg-type]

    assert on_threads(2, program) == ["the model is small"] * 2
