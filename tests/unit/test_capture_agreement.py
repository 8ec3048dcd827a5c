"""Work with sums over the ranks is captured by all of them or by none, and launched by all of them or by none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, fake_device
from messages import alike
from real_ranks import all_good
from waits import PATIENCE

from ortflow.workflow.device.capture import WARM, Repeated, Stage

LAUNCH = "cudaGraphLaunch"


class Together:
    """An agreement of ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self._values: dict[int, Any] = {}

    def everyone(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        found = [self._values[each] for each in sorted(self._values)]
        self._barrier.wait()
        return found


class OfRank:
    """The agreement as one rank sees it."""

    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def least(self, stage: Stage) -> Stage:
        return Stage(min(self._together.everyone(self._rank, stage)))

    def obstacle(self, mine: str) -> str:
        found = self._together.everyone(self._rank, mine)
        return next(f"rank {rank} cannot: {each}" for rank, each in enumerate(found) if each)


class Rank:
    """A rank whose work adds 1 to a number on its fake GPU."""

    def __init__(self, together: Together, number: int, **failing: int) -> None:
        self.library, self.log = FakeCuda(failing=failing), list[str]()
        self.device = fake_device(self.library)
        self.buffer, self._one = (self.device.allocate(1, np.float32) for _ in range(2))
        self._one.write(np.ones(1, np.float32))
        agreement = OfRank(together, number)
        self.work = Repeated(self.device, "the work", self.queue, self.log.append, agreement=agreement)

    def queue(self) -> None:
        self.library.kernel(lambda: self.buffer.write(self.buffer.read() + 1))

    @property
    def launches(self) -> int:
        return sum(name == LAUNCH for name, _ in self.library.calls)


def run(ranks: Sequence[Rank], memories: Sequence[Sequence[str]]) -> list[list[int]]:
    """Each rank's launches after each run of all; `memories` are those of the ranks in each run."""

    def all_of(rank: Rank, mine: Sequence[str]) -> list[int]:
        found = []
        for memory in mine:
            if memory:
                rank.work.run(memory)
            else:
                rank.work.skip()
            found.append(rank.launches)
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(all_of, ranks, zip(*memories, strict=True)))


def test_all_ranks_launch_from_the_same_run_on() -> None:
    together = Together(2)
    ranks = [Rank(together, number) for number in range(2)]
    expected = [0] * WARM + [1, 2, 3]
    assert run(ranks, [("a", "a")] * len(expected)) == [expected, expected]
    for rank in ranks:
        assert rank.buffer.read() == len(expected)
        assert rank.log == ["the work is captured as a CUDA graph"]


@pytest.mark.parametrize("failing", ["cudaGraphInstantiate", "cudaStreamEndCapture", "cudaStreamBeginCapture"])
def test_what_one_rank_cannot_capture_none_launches(failing: str) -> None:
    together = Together(3)
    ranks = [Rank(together, 0), Rank(together, 1, **{failing: 2}), Rank(together, 2)]
    assert run(ranks, [("a",) * 3] * 8) == [[0] * 8] * 3
    for rank in ranks:
        assert rank.buffer.read() == 8
        assert alike(rank.log, ["the work … not captured … rank 1 … out of memory (CUDA error 2)"])
        assert not rank.work.captured
    assert not ranks[0].library.graphs, "the graph of a rank that could is given back"


def test_a_batch_of_another_shape_on_one_rank_is_queued_by_all() -> None:
    together = Together(2)
    ranks = [Rank(together, number) for number in range(2)]
    memories = [("a", "a")] * (WARM + 2) + [("a", "b")] * 2 + [("a", "a")]
    expected = [0] * WARM + [1, 2, 2, 2, 3]
    assert run(ranks, memories) == [expected, expected]


def test_a_rank_without_samples_keeps_the_others_from_launching() -> None:
    together = Together(2)
    ranks = [Rank(together, number) for number in range(2)]
    memories = [("a", "a")] * (WARM + 2) + [("a", ""), ("a", "a")]
    expected = [0] * WARM + [1, 2, 2, 3]
    assert run(ranks, memories) == [expected, expected]
    assert [int(rank.buffer.read()[0]) for rank in ranks] == [WARM + 4, WARM + 3]


def test_a_graph_that_one_rank_forgets_is_launched_again_when_that_rank_has_one() -> None:
    together = Together(2)
    ranks = [Rank(together, number) for number in range(2)]
    run(ranks, [("a", "a")] * (WARM + 2))
    ranks[1].work.forget()
    expected = [2] * WARM + [3, 4]
    assert run(ranks, [("a", "a")] * (WARM + 2)) == [expected, expected]
    assert [len(rank.log) for rank in ranks] == [1, 2]


def test_an_obstacle_that_one_rank_knows_before_is_everyone_s() -> None:
    together = Together(2)
    ranks = [Rank(together, number) for number in range(2)]
    ranks[0].work.obstacle = "a node on the CPU"
    assert run(ranks, [("a", "a")] * (WARM + 3)) == [[0] * (WARM + 3)] * 2


def test_the_ranks_agree_over_mpi() -> None:
    all_good(3, PROGRAM)


PROGRAM = """
from types import SimpleNamespace
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.capture import Stage
from ortflow.workflow.trainer.overlap import OverRanks
below = MpiCommunicator()
agreement = OverRanks(SimpleNamespace(below=below))
assert agreement.least(Stage.LAUNCH) is Stage.LAUNCH
assert agreement.least(Stage.LAUNCH if below.rank else Stage.CAPTURE) is Stage.CAPTURE
assert agreement.least(Stage(below.rank)) is Stage.QUEUE
found = agreement.obstacle("no room" if below.rank == 2 else "")
assert found == "rank 2 cannot: no room", found
print("good", flush=True)
below.close()
"""
