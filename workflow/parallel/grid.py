"""The ranks as a grid: data x pipeline x horizontal. Pure.

Ranks that share a layer are neighbours, so that one machine holds all of them. The replicas of a stage come next, then
the stages. This is the order of Megatron-LM (Narayanan et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank."""

    data: int
    """Replica, from 0."""
    stage: int
    """Pipeline stage, from 0."""
    part: int
    """Part of a layer, from 0."""


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism. Their product is the world size."""

    data: int
    """Number of replicas."""
    pipeline: int = 1
    """Number of stages."""
    horizontal: int = 1
    """Number of parts of a layer."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.horizontal

    def place(self, rank: int) -> Place:
        """Coordinates of a rank of the world."""
        rest, part = divmod(rank, self.horizontal)
        stage, data = divmod(rest, self.data)
        return Place(data, stage, part)

    def rank(self, place: Place) -> int:
        """The rank of the world at these coordinates."""
        return (place.stage * self.data + place.data) * self.horizontal + place.part

    def replicas(self, rank: int) -> list[int]:
        """Ranks that hold the same part of the model, ordered by `Place.data`."""
        place = self.place(rank)
        return [self.rank(Place(data, place.stage, place.part)) for data in range(self.data)]

    def stages(self, rank: int) -> list[int]:
        """Ranks of one pipeline, ordered by stage."""
        place = self.place(rank)
        return [self.rank(Place(place.data, stage, place.part)) for stage in range(self.pipeline)]

    def parts(self, rank: int) -> list[int]:
        """Ranks that share a layer, ordered by part."""
        place = self.place(rank)
        return [self.rank(Place(place.data, place.stage, part)) for part in range(self.horizontal)]
