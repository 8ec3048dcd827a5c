"""The communicators of a rank in a grid: one with all ranks, and one for each group that the rank belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.workflow.comm import Communicator
from ortflow.workflow.parallel.grid import Grid, Place


@dataclass(frozen=True)
class GridRanks:
    """A rank's communicators. Its rank in each is its coordinate along that axis."""

    grid: Grid
    place: Place
    world: Communicator
    """All ranks."""
    replicas: Communicator
    """Ranks that hold the same part of the model."""
    stages: Communicator
    """Ranks of the same pipeline: same replica, same part."""
    parts: Communicator
    """Ranks that share its layers: same replica, same stage."""
    replica: Communicator
    """Ranks that read the same samples: all stages and parts of its replica, ordered by world rank."""

    @classmethod
    def connect(cls, world: Communicator, grid: Grid) -> GridRanks:
        """Create the communicators. Collective over the world."""
        place = grid.place(world.rank)
        replica = [rank for rank in range(grid.world_size) if grid.place(rank).data == place.data]
        groups = (grid.replicas(world.rank), grid.stages(world.rank), grid.parts(world.rank), replica)
        return cls(grid, place, world, *(world.subset(ranks) for ranks in groups))

    @property
    def speaks(self) -> bool:
        """Whether this rank counts samples and loss for its replica: the first rank of the last stage."""
        return self.place.stage == self.grid.pipeline - 1 and self.place.part == 0
