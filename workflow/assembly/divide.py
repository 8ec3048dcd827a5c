"""Builds what the ranks of a divided model hold: for each part of each stage its graphs and its tensors.

Called by `build` behind the graphs of the whole model, whose index stays the form of checkpoints and exports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import Division, Holding
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import WHOLE, Region

NAME = "division.json"
"""The division, in the folder of the whole model's graphs."""


def folder_of(root: Path, stage: int, part: int) -> Path:
    """Where the graphs lie of what the ranks of a stage and part hold."""
    return root / f"stage-{stage}-part-{part}"


@dataclass(frozen=True)
class Held:
    """The graphs and the tensors of one part of one stage."""

    files: Mapping[str, bytes]
    """By name."""
    tensors: Sequence[str]
    """Names of the tensors that it holds."""
    regions: Mapping[str, Region]
    """Of those that are divided."""


def division_of(whole: FlatIndex, grid: Grid, held: Sequence[Held]) -> Division:
    """The division, in which tensors of several holdings lie behind the others of their group.

    What a sum over all ranks counts on a rank is then a piece or two of its flat buffer. The parts of a stage have
    their tensors at the same places: replicas sum them in the same order, and what parts have in common stays equal.
    """
    holders: dict[str, int] = {}
    for each in held:
        for name in each.tensors:
            holders[name] = holders.get(name, 0) + 1

    def index(each: Held) -> FlatIndex:
        there = [entry.tensor for entry in whole if entry.name in set(each.tensors)]
        # Of a divided tensor each part has its own elements: only other stages hold the same.
        parts = {t.name: grid.horizontal if t.name in each.regions else 1 for t in there}
        there.sort(key=lambda tensor: holders[tensor.name] > parts[tensor.name])
        return FlatIndex.place(
            Tensor(t.name, each.regions.get(t.name, WHOLE).shape(t.shape), t.group) for t in there
        )

    return Division(whole, grid, tuple(Holding(index(each), dict(each.regions)) for each in held))


def graph_sets(whole: GraphSet, division: Division) -> list[GraphSet]:
    """The graphs of each holding, as their ranks load them."""
    parts = division.grid.horizontal
    return [
        replace(whole, root=folder_of(whole.root, *divmod(number, parts)), index=holding.index, notes=(), warnings=())
        for number, holding in enumerate(division.holdings)
    ]
