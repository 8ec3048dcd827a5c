"""The communicators of a rank of a grid: with all ranks, and with those that share something with it."""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.workflow.comm import Communicator
from ortflow.workflow.parallel.grid import Grid, Place


@dataclass(frozen=True)
class GridRanks:
    """A rank's communicators; it has its coordinate along an axis as its rank there."""

    grid: Grid
    place: Place
    world: Communicator
    """All ranks."""
    replicas: Communicator
    """Those that hold the same part of the model."""
    stages: Communicator
    """Those of its pipeline: same replica, same part."""
    parts: Communicator
    """Those that share its layers: same replica, same stage."""
    replica: Communicator
    """Those that read the same samples: all stages and parts of its replica, in the order of the world."""

    @classmethod
    def connect(cls, world: Communicator, grid: Grid) -> GridRanks:
        """Collective over the world."""
        here = grid.place(world.rank)
        same = [rank for rank in range(grid.world_size) if grid.place(rank).data == here.data]
        groups = (grid.replicas(world.rank), grid.stages(world.rank), grid.parts(world.rank), same)
        return cls(grid, here, world, *(world.subset(ranks) for ranks in groups))

    @property
    def speaks(self) -> bool:
        """Whether this is the one rank of its replica that counts samples and loss: of the last stage, the first."""
        return self.place.stage == self.grid.pipeline - 1 and self.place.part == 0
