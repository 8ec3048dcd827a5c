"""Reduce-scatter and all-gather over real ranks: exact sums, shares of any length, nothing else touched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from real_ranks import all_good

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import ALIGNMENT, share

PROGRAM = """
import numpy as np
from ortflow.workflow.comm import mpi
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import ALIGNMENT, share

below = mpi.MpiCommunicator()
rank, ranks = below.rank, below.world_size
for world in (below, StagedCommunicator(below)):
    for mpi.PIECE in (3, 100, 1 << 18):
        for rows in (0, 1, 2, 7, 25):
            for dtype in ("float32", "float64", "int64"):
                count = rows * ALIGNMENT
                start, stop = share(count, rank, ranks)
                mine = (np.arange(count) * (rank + 1)).astype(dtype)
                buffer = HostBuffer(mine.copy())
                world.reduce_scatter(buffer)
                expected = mine.copy()
                expected[start:stop] = np.arange(start, stop) * (ranks * (ranks + 1) // 2)
                assert np.array_equal(buffer.array, expected), (world, mpi.PIECE, rows, dtype)
                world.all_gather(buffer)
                summed = (np.arange(count) * (ranks * (ranks + 1) // 2)).astype(dtype)
                assert np.array_equal(buffer.array, summed), (world, mpi.PIECE, rows, dtype)
print("good")
below.close()
"""


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_over_real_ranks(ranks: int) -> None:
    all_good(ranks, PROGRAM)


def test_one_rank_has_it_all() -> None:
    values = np.arange(3 * ALIGNMENT, dtype=np.float32)
    buffer = HostBuffer(values.copy())
    for world in (SoloCommunicator(), StagedCommunicator(SoloCommunicator())):
        world.reduce_scatter(buffer)
        world.all_gather(buffer)
    assert np.array_equal(buffer.array, values)


def test_shares_cover_all_once() -> None:
    for rows in range(12):
        for ranks in range(1, 9):
            edges = [share(rows * ALIGNMENT, rank, ranks) for rank in range(ranks)]
            assert edges[0][0] == 0
            assert edges[-1][1] == rows * ALIGNMENT
            assert all(before[1] == after[0] for before, after in pairwise(edges))
            assert max(stop - start for start, stop in edges) == edges[0][1]


SAME_BITS = """
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import HostBuffer

everyone = MpiCommunicator()
for world in (everyone, everyone.subset(range(everyone.world_size))):
    for add in (world.all_reduce, lambda buffer: world.reduce(buffer, 1)):
        sums = []
        for call in range(8):
            buffer = HostBuffer(np.random.default_rng(world.rank).normal(size=16384).astype(np.float32))
            add(buffer)
            sums.append(buffer.array)
        assert all(np.array_equal(each, sums[0]) for each in sums), [np.abs(each - sums[0]).max() for each in sums]
print("good")
everyone.close()
"""


@pytest.mark.parametrize("ranks", [3, 4])
def test_the_first_sum_has_the_bits_of_every_later_one(ranks: int) -> None:
    """Or a resumed run, whose first sums are those of later steps, would not have the bits of an undisturbed one."""
    all_good(ranks, SAME_BITS)
