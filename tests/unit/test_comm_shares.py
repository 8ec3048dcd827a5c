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
