"""LAMB's norms on ranks whose reductions add in different orders: the same bits on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from parts import Parts

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.trainer.tensor_norms import sum_over, take_over_first

COUNT = 50


class AnyOrder(Communicator):
    """Some ranks of all. Each adds in another order, as MPI may."""

    def __init__(self, world: Parts, ranks: list[int]) -> None:
        self._world, self._ranks = world, ranks

    @property
    def rank(self) -> int:
        return self._ranks.index(self._world.rank)

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, buffer: Any) -> None:
        found = self._world.exchange("all_reduce", buffer.array)
        total = np.zeros_like(buffer.array)
        turn = self._world.rank
        for place in range(len(self._ranks)):
            total += found[self._ranks[(place + turn) % len(self._ranks)]]
        buffer.array[:] = total


def values(rank: int) -> npt.NDArray[np.float64]:
    return np.exp(np.random.default_rng(rank).normal(0, 6, COUNT))


def test_ranks_of_the_test_add_in_different_orders() -> None:
    world = Parts(3)

    def summed(rank: int) -> bytes:
        mine = HostBuffer(values(rank))
        AnyOrder(world, [0, 1, 2]).all_reduce(mine)
        return mine.array.tobytes()

    assert len(set(world.run(summed))) > 1


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("grid", [Grid(3), Grid(1, 1, 3), Grid(3, 1, 3)], ids=str)
def test_all_ranks_have_the_same_bits(grid: Grid, sharded: bool) -> None:
    world = Parts(grid.world_size)
    # The first half is of tensors that every part holds whole: their terms are equal.
    whole = np.arange(COUNT) < COUNT // 2

    def terms(rank: int) -> npt.NDArray[np.float64]:
        here = grid.place(rank)
        data = here.data if sharded else 0
        noise = 1 if sharded else 1 + 1e-16 * here.data
        return np.where(whole, values(100 + data), values(10 * data + here.part)) * noise

    def norms(rank: int) -> npt.NDArray[np.float64]:
        sums = HostBuffer(terms(rank))
        replicas, parts = AnyOrder(world, grid.replicas(rank)), AnyOrder(world, grid.parts(rank))
        mine = ~whole | (grid.place(rank).part == 0)
        sum_over(sums, mine, replicas if sharded else SoloCommunicator(), parts)
        take_over_first(sums, replicas, parts)
        return sums.array

    found = world.run(norms)
    assert len({each.tobytes() for each in found}) == 1
    replicas = range(grid.data if sharded else 1)
    expected = sum(
        np.where(whole, values(100 + data), sum(values(10 * data + part) for part in range(grid.horizontal)))
        for data in replicas
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-14)
