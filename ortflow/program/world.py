"""This process's place among the ranks, from the variables that ortflow, torchrun and others set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ortflow.program.errors import ProgramError


class World(NamedTuple):
    """Numbers of this rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world(environment: Mapping[str, str] = os.environ) -> World:
    """Return the place; rank 0 of 1 without the variables. Raises ProgramError if they contradict each other."""
    names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not environment.get("RANK") and environment.get("HOROVOD_RANK"):  # horovodrun sets these alone
        names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK")
    texts = [environment.get(name) or default for name, default in zip(names, World(), strict=True)]
    try:
        place = World(*map(int, texts))
    except ValueError:
        raise ProgramError(
            "the variables of this rank are not numbers: " + ", ".join(map("{}={!r}".format, names, texts))
        ) from None
    if not 0 <= place.rank < place.size:
        raise ProgramError(
            f"{names[0]}={place.rank} and {names[1]}={place.size} do not fit together: set both, or neither"
        )
    return place
