"""Ranks and their coordinates in a grid of replicas, stages and parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ortflow.workflow.parallel.grid import Grid, Place

GRIDS = [Grid(*degrees) for degrees in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3))]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_place_has_one_rank(grid: Grid) -> None:
    places = [grid.place(rank) for rank in range(grid.world_size)]
    every = itertools.product(range(grid.data), range(grid.pipeline), range(grid.horizontal))
    assert set(places) == {Place(*coordinates) for coordinates in every}
    assert [grid.rank(place) for place in places] == list(range(grid.world_size))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_differ_in_one_coordinate(grid: Grid) -> None:
    for rank in range(grid.world_size):
        here = grid.place(rank)
        assert [grid.place(each) for each in grid.replicas(rank)] == [replace(here, data=d) for d in range(grid.data)]
        assert [grid.place(each) for each in grid.stages(rank)] == [
            replace(here, stage=s) for s in range(grid.pipeline)
        ]
        parts = grid.parts(rank)
        assert [grid.place(each) for each in parts] == [replace(here, part=p) for p in range(grid.horizontal)]
        assert parts == list(range(parts[0], parts[0] + grid.horizontal)), "ranks that share a layer are neighbours"
