"""Which tensors a rank's stage shares with other stages, and which its part shares with other parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.workflow.layout import TRAINED
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.grid import Place


@dataclass(frozen=True)
class Tie:
    """A tensor that this rank shares with others."""

    start: int
    stop: int
    """Its elements of the local flat buffers."""
    stages: tuple[int, ...]
    """The stages that hold it. The first one updates it first."""


def ties(division: Division, place: Place) -> list[Tie]:
    """The trained tensors that this rank's stage shares with others, in the same order on all of them.

    Raises ValueError if the same elements are held by different parts of the stages: these ranks share no communicator.
    """
    parts, number = division.grid.horizontal, division.number(place)
    index, shared_tensors = division.holdings[number].index, []
    for entry in division.whole:
        if entry.name not in index or entry.tensor.group not in TRAINED:
            continue
        holders = [divmod(holder, parts) for holder in division.holders(number, entry.name)]
        if len({stage for stage, _ in holders}) < 2:
            continue
        # If every part of a stage holds the whole tensor, each is tied to the same part of the other stages.
        stages = tuple(stage for stage, part in holders if part == place.part)
        if len(stages) != len({stage for stage, _ in holders}):
            raise ValueError(f"{entry.name} is not divided alike in all stages that use it")
        local_entry = index[entry.name]
        shared_tensors.append(Tie(local_entry.offset, local_entry.end, stages))
    return shared_tensors


def common(division: Division, place: Place) -> list[tuple[int, int]]:
    """Elements [start, stop) of the local flat buffers that every part of the stage holds, adjacent ones joined."""
    if division.grid.horizontal == 1:
        return []
    holding, spans = division.of(place), list[tuple[int, int]]()
    apart = True
    for entry in holding.index:
        if entry.name in holding.regions or entry.tensor.group not in TRAINED:
            apart = True
        elif entry.tensor.count:
            spans.append((entry.offset, entry.end) if apart else (spans.pop()[0], entry.end))
            apart = False
    return spans
