"""Random models, divided at random among the ranks of random grids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortflow.workflow.layout import GROUPS, FlatIndex, Tensor
from ortflow.workflow.parallel.division import Division, Holding
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import WHOLE, Region

Array = npt.NDArray[np.float32]


def part_of(shape: tuple[int, ...], axis: int, part: int, parts: int, blocks: int = 1) -> Region:
    """Part `part` of `parts` along an axis that consists of `blocks` blocks, each divided alike (packed q, k and v).

    Raises
    ------
    ValueError
        If a block cannot be divided evenly.
    """
    each, rest = divmod(shape[axis], parts * blocks)
    if rest:
        raise ValueError(f"axis {axis} of {list(shape)} is not divisible by {parts * blocks}")
    block = each * parts
    starts = [number * block + part * each for number in range(blocks)]
    return Region(axis, tuple((start, start + each) for start in starts))


def undivided(index: FlatIndex, grid: Grid) -> Division:
    """The division in which every rank holds the whole model, as in data parallelism."""
    return Division(index, grid, tuple(Holding(index) for _ in range(grid.pipeline * grid.horizontal)))


def random_division(random: np.random.Generator, grid: Grid) -> Division:
    """Tensors of every group and of up to three axes: whole on all parts, divided along an axis in blocks, or in ranges
    of unequal length; some in one stage, some tied between several."""
    tensors, layers = [], []
    for number in range(int(random.integers(1, 9))):
        axes, parts = int(random.integers(0, 4)), grid.horizontal
        shape = tuple(int(each) for each in random.integers(1, 5, axes))
        regions = [WHOLE] * parts
        if axes and random.random() < 0.7:
            axis, blocks = int(random.integers(axes)), int(random.integers(1, 4))
            if random.random() < 0.5:
                shape = (*shape[:axis], shape[axis] * parts * blocks, *shape[axis + 1 :])
                regions = [part_of(shape, axis, part, parts, blocks) for part in range(parts)]
            else:
                shape = (*shape[:axis], shape[axis] + parts, *shape[axis + 1 :])
                cuts = np.sort(random.choice(np.arange(1, shape[axis]), parts - 1, replace=False)).tolist()
                edges = [0, *cuts, shape[axis]]
                regions = [Region(axis, ((edges[part], edges[part + 1]),)) for part in range(parts)]
        group = GROUPS[int(random.integers(len(GROUPS)))]
        tensors.append(Tensor(f"t{number}", shape, group))
        stages = random.permutation(grid.pipeline)[: 1 + int(random.random() < 0.3)]
        layers.append((regions, {int(stage) for stage in stages}))
    holdings = []
    for stage in range(grid.pipeline):
        for part in range(grid.horizontal):
            mine = [(t, regions[part]) for t, (regions, stages) in zip(tensors, layers, strict=True) if stage in stages]
            order = [mine[place] for place in random.permutation(len(mine))]
            index = FlatIndex.place(Tensor(t.name, region.shape(t.shape), t.group) for t, region in order)
            holdings.append(Holding(index, {t.name: region for t, region in order if not region.whole}))
    return Division(FlatIndex.place(tensors), grid, tuple(holdings))


@dataclass(frozen=True)
class Values:
    """A canonical state with its padding zero, and what of it a holding's local buffers contain."""

    division: Division
    seed: int

    def tensors(self, name: str) -> dict[str, Array]:
        """Of a buffer, by the names of the tensors."""
        random = np.random.default_rng([self.seed, len(name)])
        return {e.name: random.normal(size=e.tensor.shape).astype(np.float32) for e in self.division.whole}

    def canonical(self, name: str, count: int) -> Array:
        """The whole buffer, or the trained part of it."""
        return flat(self.division.whole, self.tensors(name))[:count]

    def local(self, name: str, number: int, count: int) -> Array:
        """The local buffer of a holding, made without the code under test."""
        holding, tensors = self.division.holdings[number], self.tensors(name)
        return flat(holding.index, {e.name: holding.region(e.name).of(tensors[e.name]) for e in holding.index})[:count]


def flat(index: FlatIndex, tensors: dict[str, Array]) -> Array:
    made = np.zeros(index.size, np.float32)
    for entry in index:
        made[entry.offset : entry.end] = tensors[entry.name].ravel()
    return made
