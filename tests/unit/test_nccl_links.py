"""Messages between GPUs through NCCL: in order on each link, and beside what else is queued."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import fake_device
from thread_links import LinkedNccl, StreamedCuda
from thread_wire import on_threads

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import BLOCKS_BESIDE, NcclCommunicator
from ortflow.workflow.device.cpu import HostBuffer


def test_messages_of_links_meet_in_order_whatever_is_queued_first() -> None:
    library = LinkedNccl()
    links = [(0, 1, 5), (1, 0, 5), (0, 1, 7)]

    def program(below: Communicator) -> None:
        device = fake_device(library.here(StreamedCuda()))
        world = NcclCommunicator(below, device, library)
        world.connect_links(links)
        me, other = world.rank, 1 - world.rank
        first, second, third = (device.allocate(4, np.float32) for _ in range(3))
        if me == 0:
            # Receives are queued ahead of the sends that the other rank needs.
            arriving = world.start_receive(third, other, 5)
            first.fill(1)
            second.fill(2)
            sent = [world.start_send(first, other, 5), world.start_send(second, other, 7)]
            sent.append(world.start_send(second, other, 5))
        else:
            requests = [world.start_receive(each, other, tag) for each, tag in ((second, 7), (first, 5), (third, 5))]
            for request in requests:
                request.wait()
            assert [float(each.read()[0]) for each in (first, second, third)] == [1, 2, 2]
            first.fill(3)
            arriving, sent = world.start_send(first, other, 5), []
        for request in (*sent, arriving):
            request.wait()
        if me == 0:
            np.testing.assert_array_equal(third.read(), np.full(4, 3))
        world.barrier()
        world.close()
        assert not device.after_wait

    on_threads(2, program)
    assert library.sent == 3 + 4, "each link was tried once"


@pytest.mark.parametrize("beside", [True, False])
def test_messages_beside_passes_take_few_of_the_gpus_processors(*, beside: bool) -> None:
    library = LinkedNccl()

    def program(below: Communicator) -> None:
        world = NcclCommunicator(below, fake_device(library.here(StreamedCuda())), library)
        assert all(blocks < 0 for blocks in library.blocks)
        world.barrier()
        world.connect_links([(0, 1, 0)], during_passes=beside)
        world.barrier()
        world.close()

    on_threads(2, program)
    asked = library.blocks[2:]
    assert asked == [BLOCKS_BESIDE] * 2 if beside else all(blocks < 0 for blocks in asked)


def test_links_of_some_ranks_are_connected_without_the_others() -> None:
    library = LinkedNccl()
    links = [(rank, rank + 1, 0) for rank in range(3)] + [(rank + 1, rank, 1) for rank in range(3)]

    def program(below: Communicator) -> float:
        device = fake_device(library.here(StreamedCuda()))
        world = NcclCommunicator(below, device, library)
        # Every rank may name all links, or only its own, in any order.
        mine = [link for link in links if world.rank in link[:2]]
        world.connect_links(reversed(mine) if world.rank % 2 else links)
        token = device.allocate(1, np.float32)
        if world.rank:
            world.receive(token, world.rank - 1)
        token.write(token.read() + world.rank + 1)
        if world.rank < 3:
            world.send(token, world.rank + 1)
        world.barrier()
        found = float(token.read()[0])
        world.close()
        return found

    assert on_threads(4, program) == [1, 3, 6, 10]


@pytest.mark.parametrize("connected", [True, False])
def test_other_messages_pass_through_host_memory(*, connected: bool) -> None:
    library = LinkedNccl()

    def program(below: Communicator) -> float:
        device = fake_device(library.here(StreamedCuda()))
        world = NcclCommunicator(below, device, library)
        if connected:
            world.connect_links([(0, 1, 0)])
        buffer = HostBuffer(np.zeros(3)) if connected else device.allocate(3, np.float32)
        before = library.sent
        if world.rank:
            world.receive(buffer, 0)
        else:
            buffer.fill(4)
            world.send(buffer, 1)
        assert library.sent == before
        world.barrier()
        world.close()
        return float(buffer.read()[0])

    assert on_threads(2, program) == [4, 4]


def test_memory_is_freed_where_nobody_waits() -> None:
    library = LinkedNccl()

    def program(below: Communicator) -> None:
        cuda = library.here(StreamedCuda())
        device = fake_device(cuda)
        world = NcclCommunicator(below, device, library)
        pair = world.subset([0, 1])
        pair.connect_links([(0, 1, 0)])
        message, other = device.allocate(4, np.float32), device.allocate(64, np.float32)
        request = pair.start_send(message, 1) if world.rank == 0 else None
        address = other.pointer
        del other
        assert address in cuda.blocks, "freeing it would wait for the message"
        request = request or pair.start_receive(message, 0)
        request.wait()
        device.free_memory()
        assert address not in cuda.blocks
        assert cuda.stuck == []
        world.barrier()
        world.close()
        assert not device.after_wait, "links of a subset are left, too"

    on_threads(2, program)
