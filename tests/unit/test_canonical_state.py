"""What ranks hold of a divided model, brought into the shares of a checkpoint and out again, is the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from divided_models import Values, part_of, random_division, undivided
from real_ranks import all_good

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import Division, Holding
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import Region
from ortflow.workflow.parallel.runs import Runs, put, runs_of, take
from ortflow.workflow.trainer.canonical import CanonicalState, Exchange

SUPPORT = Path(__file__).parent.parent / "support"
GRIDS = [
    Grid(data, pipeline, horizontal)
    for data in (1, 2, 3, 4)
    for pipeline in (1, 2, 3)
    for horizontal in (1, 2, 3)
    if data * pipeline * horizontal <= 12
]


@pytest.mark.rotates
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_element_goes_where_it_belongs(grid: Grid) -> None:
    """Without messages: of each pair of ranks the runs, and what all of them together make of the buffers."""
    random = np.random.default_rng([grid.data, grid.pipeline, grid.horizontal])
    for trial in range(6):
        division = random_division(random, grid)
        read = Division.from_json(division.whole, json.loads(json.dumps(division.to_json())), division.grid)
        assert read.to_json() == division.to_json()
        assert [dict(each.regions) for each in read.holdings] == [dict(each.regions) for each in division.holdings]
        values = Values(division, trial)
        for trained, sharded in ((False, False), (True, False), (True, True), (False, True)):
            exchange = Exchange(division, trained, sharded)
            check_exchange(exchange, values)


def check_exchange(exchange: Exchange, values: Values) -> None:
    division, ranks = exchange.division, range(exchange.division.grid.world_size)
    whole = values.canonical("parameters", exchange.count)
    numbers = [division.number(division.grid.place(rank)) for rank in ranks]
    indices = [division.holdings[number].index for number in numbers]
    counts = [index.trained if exchange.trained else index.size for index in indices]
    local = [values.local("parameters", number, count) for number, count in zip(numbers, counts, strict=True)]
    saved, times = np.zeros_like(whole), np.zeros(exchange.count, int)
    for holder in ranks:
        for saver in ranks:
            runs = exchange.gathered(holder, saver)
            start, stop = exchange.share(saver)
            assert ((runs.whole >= start) & (runs.whole + runs.length <= stop)).all()
            first, last = exchange.held(holder)
            assert ((runs.local >= first) & (runs.local + runs.length <= last)).all()
            put(saved, runs.whole, runs.length, take(local[holder], runs.local, runs.length))
            np.add.at(
                times,
                np.concatenate(
                    [np.arange(s, s + n) for s, n in zip(runs.whole, runs.length, strict=True)] or [np.empty(0, int)]
                ),
                1,
            )
    assert np.array_equal(saved, whole)
    # Each element comes from one rank alone.
    assert times.max(initial=0) <= 1
    for holder in ranks:
        first, last = exchange.held(holder)
        loaded = np.zeros_like(local[holder])
        for saver in ranks:
            runs = exchange.scattered(saver, holder)
            put(loaded, runs.local, runs.length, take(whole, runs.whole, runs.length))
        assert np.array_equal(loaded[first:last], local[holder][first:last])
        assert not loaded[:first].any()
        assert not loaded[last:].any()


def test_pieces_are_the_same_elements_in_the_same_order() -> None:
    runs = runs_of((3, 10, 2), Region(1, ((1, 3), (4, 9)))).moved(100, 7)
    assert runs.count == 3 * 7 * 2
    array, expected = np.arange(200), take(np.arange(200), runs.whole, runs.length)
    assert expected[:6].tolist() == [102, 103, 104, 105, 108, 109]
    for size in (1, 2, 3, 5, 13, 41, 42, 43):
        pieces = list(runs.pieces(size))
        assert [piece.count for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
        assert np.concatenate([take(array, p.whole, p.length) for p in pieces]).tolist() == expected.tolist()
        assert np.concatenate([take(array, p.local, p.length) for p in pieces]).tolist() == list(range(7, 49))


def test_long_and_short_runs_are_copied_alike() -> None:
    array = np.arange(5000.0)
    for runs in (runs_of((7, 600), Region(1, ((10, 500),))), runs_of((600, 7), Region(1, ((1, 4),)))):
        taken = take(array, runs.whole, runs.length)
        target = np.zeros(5000)
        put(target, runs.whole, runs.length, taken)
        kept = np.concatenate([np.arange(s, s + n) for s, n in zip(runs.whole, runs.length, strict=True)])
        assert taken.tolist() == array[kept].tolist()
        assert target[kept].tolist() == taken.tolist()
        assert target.sum() == taken.sum()
    nothing = Runs(*(np.empty(0, np.int64) for _ in range(3)))
    assert take(array, nothing.whole, nothing.length).size == 0


def test_holdings_that_do_not_cover_the_model_are_refused() -> None:
    whole = FlatIndex.place([Tensor("w", (4, 6), "decay"), Tensor("b", (6,), "no_decay")])

    def held(*ranges: tuple[int, int], bias: bool = True) -> Holding:
        region = Region(1, ranges)
        tensors = [Tensor("w", region.shape((4, 6)), "decay"), *([Tensor("b", (6,), "no_decay")] if bias else [])]
        return Holding(FlatIndex.place(tensors), {"w": region})

    grid = Grid(1, 1, 2)
    Division(whole, grid, (held((0, 2)), held((2, 6), bias=False)))
    for one, other, name in ((held((0, 2)), held((3, 6)), "w"), (held((0, 3)), held((2, 6)), "w"),
                             (held((0, 2), bias=False), held((2, 6), bias=False), "b")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is not covered once"):
            Division(whole, grid, (one, other))
    with pytest.raises(ValueError, match="do not fit"):
        Division(whole, grid, (Holding(whole),))
    with pytest.raises(ValueError, match=r"\[4, 6\].*\[4, 3\]"):
        Division(whole, grid, (Holding(whole, {"w": part_of((4, 6), 1, 0, 2)}), held((3, 6))))
    assert undivided(whole, grid).counts(0, "w")
    assert not undivided(whole, grid).counts(1, "w")


def test_one_rank_holds_what_it_saves() -> None:
    index = FlatIndex.place([Tensor("w", (3, 5), "decay"), Tensor("s", (4,), "state")])
    parameters, moment = HostBuffer(np.arange(float(index.size), dtype=np.float32)), HostBuffer(np.ones(64, np.float32))
    for start, stop in ((15, 64), (68, 128)):
        parameters.array[start:stop] = moment.array[start:] = 0
    state = CanonicalState(undivided(index, Grid(1)), SoloCommunicator(), {"parameters": parameters, "m": moment})
    assert {name: (each.start, each.count) for name, each in state.shares.items()} == {
        "parameters": (0, 128), "m": (0, 64)
    }  # fmt: skip
    state.gather()
    assert state.shares["parameters"].part.read().tolist() == parameters.array.tolist()
    before, parameters.array[:] = parameters.read(), 0
    state.scatter()
    assert parameters.array.tolist() == before.tolist()


PROGRAM = """
import sys
import numpy as np
sys.path.insert(0, SUPPORT)
from divided_models import Values, part_of, random_division, undivided
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import share
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.trainer import canonical

world = MpiCommunicator()
random = np.random.default_rng(7)
for number, sizes in enumerate(GRIDS * 4):
    grid = Grid(*sizes)
    division = random_division(random, grid)
    values, place = Values(division, number), grid.place(world.rank)
    here = division.number(place)
    index = division.holdings[here].index
    for sharded in (False, True):
        for canonical.PIECE in (3, 1 << 20):
            counts = {"parameters": index.size, "moment1": index.trained}
            held, expected = {}, {}
            for name, count in counts.items():
                mine = values.local(name, here, count)
                first, last = share(count, place.data, grid.data) if sharded and name != "parameters" else (0, count)
                expected[name] = mine[first:last]
                part = HostBuffer(mine[first:last].copy())
                held[name] = part if not sharded or name == "parameters" else Shard(part, first, count)
            state = canonical.CanonicalState(division, world, held)
            state.gather()
            for name, each in state.shares.items():
                whole = values.canonical(name, each.count)
                assert (each.start, each.stop) == share(each.count, world.rank, grid.world_size)
                assert np.array_equal(each.part.array, whole[each.start : each.stop]), (sizes, name)
                (held[name].part if isinstance(held[name], Shard) else held[name]).fill(0)
            state.scatter()
            for name, each in held.items():
                part = each.part if isinstance(each, Shard) else each
                assert np.array_equal(part.array, expected[name]), (sizes, name)
print("good")
world.close()
"""


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("ranks", "grids"),
    [(2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)]), (4, [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)])],
)
def test_real_ranks_exchange_it(ranks: int, grids: list[tuple[int, int, int]]) -> None:
    program = PROGRAM.replace("GRIDS", repr(grids)).replace("SUPPORT", repr(str(SUPPORT)))
    all_good(ranks, program)


def test_a_share_is_not_taken_for_a_whole_buffer() -> None:
    """Under ZeRO a rank sends what is its own: an exchange of whole buffers would read past it."""
    index = FlatIndex.place([Tensor("w", (100,), "decay")])
    division = undivided(index, Grid(2))
    assert Exchange(division, True, True).held(1) == (64, 128)
    assert Exchange(division, True, False).held(1) == (0, 128)
    assert isinstance(Shard(HostBuffer(np.zeros(64)), 64, 128), Shard)
