"""Shares through NCCL: reduce-scatter, all-gather and sub-communicators between ranks with fake GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import FakeCuda, fake_device
from thread_nccl import ThreadNccl
from thread_wire import on_threads

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import share


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 128), (2, 192), (3, 640), (4, 64), (4, 0), (3, 100)])
def test_every_rank_gets_its_share_and_gives_it_to_all(ranks: int, count: int, dtype: str) -> None:
    library = ThreadNccl()

    def program(below: Communicator) -> None:
        world = NcclCommunicator(below, fake_device(FakeCuda()), library)
        buffer, rank = world.device.allocate(count, dtype), world.rank
        values = [np.random.default_rng(each).integers(0, 1000, count).astype(dtype) for each in range(ranks)]
        buffer.write(values[rank])
        world.reduce_scatter(buffer)
        start, stop = share(count, rank, ranks)
        expected = values[rank].copy()
        expected[start:stop] = np.sum(values, axis=0)[start:stop]
        np.testing.assert_array_equal(buffer.read(), expected)
        world.all_gather(buffer)
        np.testing.assert_array_equal(buffer.read(), np.sum(values, axis=0))
        world.close()

    on_threads(ranks, program)
    even = count == ranks * share(count, 0, ranks)[1]
    assert ("ncclReduceScatter" in library.calls) == ("ncclAllGather" in library.calls) == (even and count > 0)


def test_buffers_on_the_host_are_shared_by_mpi() -> None:
    library = ThreadNccl()

    def program(below: Communicator) -> None:
        world = NcclCommunicator(below, fake_device(FakeCuda()), library)
        buffer = HostBuffer(np.full(128, world.rank + 1.0))
        world.reduce_scatter(buffer)
        world.all_gather(buffer)
        assert (buffer.array == 3).all()
        world.close()

    on_threads(2, program)
    assert not library.calls


def test_some_of_the_ranks_have_a_communicator_of_their_own() -> None:
    library = ThreadNccl()

    def program(below: Communicator) -> None:
        device = fake_device(FakeCuda())
        world = NcclCommunicator(below, device, library)
        pair = world.subset([0, 2] if world.rank in (0, 2) else [3, 1])
        assert (pair.rank, pair.world_size) == ({0: 0, 2: 1, 3: 0, 1: 1}[world.rank], 2)
        buffer = device.allocate(128, np.float32)
        buffer.fill(10.0**world.rank)
        pair.all_reduce(buffer)
        assert (buffer.read() == (101 if world.rank in (0, 2) else 1010)).all()
        world.all_reduce(buffer)
        assert (buffer.read() == 2222).all()
        assert isinstance(world.subset([world.rank]), SoloCommunicator)
        with pytest.raises(ValueError, match="not among"):
            world.subset([(world.rank + 1) % 4])
        assert len(device.after_wait) == 2
        world.close()
        assert not device.after_wait

    on_threads(4, program)
