"""Subsets of the ranks and messages between them, over real ranks: sums, orders, tags, types and lengths."""

from __future__ import annotations

import numpy as np
import pytest
from real_ranks import all_good

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import HostBuffer

SUBSETS = """
import numpy as np
from itertools import combinations
from ortflow.workflow.comm import mpi
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import ALIGNMENT, share
from ortflow.workflow.parallel.grid import Grid

base = mpi.MpiCommunicator()
for world in (base, StagedCommunicator(base)):
    rank, ranks = world.rank, world.world_size
    for size in range(1, ranks + 1):
        for chosen in combinations(range(ranks), size):
            if rank not in chosen:
                continue
            for order in (chosen, chosen[::-1]):
                some = world.subset(order)
                assert (some.rank, some.world_size) == (order.index(rank), size), (order, some.rank)
                buffer = HostBuffer(np.full(2 * ALIGNMENT, 10.0**rank))
                some.all_reduce(buffer)
                assert buffer.array[0] == sum(10.0**each for each in order)
                start, stop = share(buffer.count, some.rank, size)
                buffer.array[start:stop] = rank
                some.all_gather(buffer)
                assert [buffer.array[share(buffer.count, place, size)[0]] for place in range(min(size, 2))] == \\
                    list(order[:2])
                assert some.broadcast_object(rank) == order[0]
                assert some.gather(rank) == (list(order) if some.rank == 0 else None)
                within = some.subset([some.rank])
                assert (within.rank, within.world_size) == (0, 1)
                some.barrier()
                some.close()
    for wrong in ([], [(rank + 1) % ranks] if ranks > 1 else [1], [rank, rank]):
        try:
            world.subset(wrong)
            raise SystemExit(f"{wrong} was accepted")
        except ValueError:
            pass
if ranks == 4:
    grid = Grid(2, 2)
    # Different subsets at the same time, in the same order on every rank.
    replicas, stages = base.subset(grid.replicas(rank)), base.subset(grid.stages(rank))
    one, other = HostBuffer(np.array([10.0**rank])), HostBuffer(np.array([10.0**rank]))
    replicas.all_reduce(one)
    stages.all_reduce(other)
    assert one.array[0] == sum(10.0**each for each in grid.replicas(rank))
    assert other.array[0] == sum(10.0**each for each in grid.stages(rank))
print("good")
base.close()
"""

MESSAGES = """
import numpy as np
from ortflow.workflow.comm import TAGS, mpi
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cpu import HostBuffer

base = mpi.MpiCommunicator()
for world in (base, StagedCommunicator(base), base.subset(list(range(base.world_size))[::-1])):
    rank, ranks = world.rank, world.world_size
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for mpi.CHUNK in (24, 1 << 30):
        for dtype in ("float32", "float16", "int64", "bool", "float64"):
            for count in (0, 1, 7, 1000):
                sent = [HostBuffer((np.arange(count) * (m + 2) * (rank + 1) % 5).astype(dtype)) for m in range(3)]
                got = [HostBuffer(np.zeros(count, dtype)) for m in range(3)]
                tags = (0, 5, TAGS - 1)
                # Received in another order than sent: the tags tell them apart.
                waiting = [world.start_receive(got[m], before, tags[m]) for m in (2, 0, 1)]
                sending = [world.start_send(sent[m], after, tags[m]) for m in (1, 2, 0)]
                for request in (*sending, *waiting):
                    request.wait()
                for m in range(3):
                    expected = (np.arange(count) * (m + 2) * (before + 1) % 5).astype(dtype)
                    assert np.array_equal(got[m].array, expected), (dtype, count, m)
    # A sum in between does not take a message for its own, nor the other way round.
    expected = HostBuffer(np.zeros(64))
    waiting = world.start_receive(expected, before, 3)
    summed = HostBuffer(np.full(64 * ranks, 1.0))
    world.reduce_scatter(summed)
    world.all_gather(summed)
    world.send(HostBuffer(np.full(64, rank + 0.5)), after, 3)
    waiting.wait()
    assert (summed.array == ranks).all()
    assert (expected.array == before + 0.5).all()
    if rank == 0:
        world.send(HostBuffer(np.array([7])), 1)
    elif rank == 1:
        number = HostBuffer(np.array([0]))
        world.receive(number, 0)
        assert number.array[0] == 7
print("good")
base.close()
"""


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_subsets_of_real_ranks(ranks: int) -> None:
    all_good(ranks, SUBSETS)


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_between_real_ranks(ranks: int) -> None:
    all_good(ranks, MESSAGES)


def test_one_rank_has_no_other() -> None:
    solo, buffer = SoloCommunicator(), HostBuffer(np.zeros(3))
    assert solo.subset([0]).world_size == 1
    with pytest.raises(ValueError, match="not a subset"):
        solo.subset([1])
    with pytest.raises(ValueError, match="the only rank"):
        solo.send(buffer, 1)
    with pytest.raises(ValueError, match="the only rank"):
        solo.receive(buffer, 0)
