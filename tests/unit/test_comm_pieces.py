"""Parts of unequal length over real ranks, and which parts of tensors the ranks hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_ranks import all_good

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import FlatIndex, Tensor, share
from ortflow.workflow.parallel.pieces import batches, pieces_of

PROGRAM = """
import numpy as np
from ortflow.workflow.comm import mpi
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cpu import HostBuffer

below = mpi.MpiCommunicator()
rank, ranks = below.rank, below.world_size
for world in (below, StagedCommunicator(below)):
    for mpi.CHUNK in (7, 1 << 30):
        for counts in ([5] * ranks, list(range(ranks)), [0] * (ranks - 1) + [20], [9] + [0] * (ranks - 1)):
            start = sum(counts[:rank])
            whole = np.arange(sum(counts), dtype=np.float32)
            here = np.full(len(whole), -1, np.float32)
            here[start : start + counts[rank]] = whole[start : start + counts[rank]]
            buffer = HostBuffer(here)
            under_way = world.start_gather(buffer, counts)
            total = HostBuffer(np.ones(3, np.float64))
            world.all_reduce(total)
            under_way.wait()
            assert np.array_equal(buffer.array, whole), (world, counts)
            assert (total.array == ranks).all()
        for root in range(ranks):
            mine = np.arange(20, dtype=np.float32) * (rank + 1)
            buffer = HostBuffer(mine.copy())
            world.reduce(buffer, root)
            summed = np.arange(20) * (ranks * (ranks + 1) // 2)
            assert np.array_equal(buffer.array, summed if rank == root else mine), (world, root)
print("good")
below.close()
"""


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_over_real_ranks(ranks: int) -> None:
    all_good(ranks, PROGRAM, timeout=300)


def test_one_rank_has_it_all() -> None:
    buffer = HostBuffer(np.arange(5, dtype=np.float32))
    world = SoloCommunicator()
    world.start_gather(buffer, [5]).wait()
    world.reduce(buffer, 0)
    assert np.array_equal(buffer.array, np.arange(5))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 500), st.data())
def test_pieces_are_every_element_once_where_it_is_held(
    sizes: list[int], ranks: int, room: int, data: st.DataObject
) -> None:
    index = FlatIndex.place(Tensor(str(place), (size,), "decay") for place, size in enumerate(sizes))
    chosen = data.draw(st.permutations(list(index)))[: data.draw(st.integers(0, len(sizes)))]
    found = pieces_of(chosen, index.trained, ranks)
    assert [piece.rank for piece in found] == sorted(piece.rank for piece in found)
    covered = {place: np.zeros(entry.tensor.count, int) for place, entry in enumerate(chosen)}
    for piece in found:
        start, stop = share(index.trained, piece.rank, ranks)
        assert start <= piece.offset < piece.offset + piece.count <= stop
        assert piece.offset == chosen[piece.tensor].offset + piece.start
        covered[piece.tensor][piece.start : piece.stop] += 1
    assert all((each == 1).all() for each in covered.values())
    messages = list(batches(found, room))
    assert all(0 < sum(piece.count for piece in message) <= room for message in messages)
    assert all(len({piece.rank for piece in message}) == 1 for message in messages)
    cut = [
        place for message in messages for piece in message for place in range(piece.offset, piece.offset + piece.count)
    ]
    assert cut == [place for piece in found for place in range(piece.offset, piece.offset + piece.count)]
