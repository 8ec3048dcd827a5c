"""Which tensors, and which regions of them, the ranks of each stage and part hold. Pure.

The flat index of the whole model is the canonical form, and the only one in checkpoints and exports. A `Holding` has
its own flat index of the regions that its ranks hold, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ortflow.workflow.layout import TRAINED, FlatIndex
from ortflow.workflow.parallel.grid import Grid, Place
from ortflow.workflow.parallel.region import WHOLE, Region
from ortflow.workflow.parallel.runs import Runs, joined, runs_of

NAME = "division.json"
"""File of the division, in the folder of the whole model's graphs."""
CHANNEL = 0
"""Channel of the collectives in a part's graphs: the ranks that share its layers."""
STATISTICS = 1
"""Channel of the statistics of BatchNormalization: all ranks (`train.sync_batch_norm`)."""


@dataclass(frozen=True)
class Holding:
    """What the replicas of one part of one stage hold."""

    index: FlatIndex
    """Names as in the whole model, shapes of the regions."""
    regions: Mapping[str, Region] = field(default_factory=dict)
    """Regions of the tensors that are divided; the others are held whole."""

    def region(self, name: str) -> Region:
        """The region that it holds of a tensor."""
        return self.regions.get(name, WHOLE)


@dataclass(frozen=True)
class Division:
    """A whole model, divided among the ranks of a grid.

    Raises ValueError if the holdings do not cover the model, each element once or with equal regions on several ranks.
    """

    whole: FlatIndex
    grid: Grid
    holdings: Sequence[Holding]
    """Ordered by `place`: the parts of the first stage, then those of the next."""

    def __post_init__(self) -> None:
        if len(self.holdings) != self.grid.pipeline * self.grid.horizontal:
            raise ValueError(f"{len(self.holdings)} holdings do not fit {self.grid}")
        for holding in self.holdings:
            for entry in holding.index:
                tensor = self.whole[entry.name].tensor
                shape = holding.region(entry.name).shape(tensor.shape)
                if (shape, tensor.group) != (entry.tensor.shape, entry.tensor.group):
                    raise ValueError(f"{entry.name} is {list(entry.tensor.shape)} and should be {list(shape)}")
        for entry in self.whole:
            runs = joined(
                runs_of(entry.tensor.shape, holding.region(entry.name))
                for number, holding in enumerate(self.holdings)
                if entry.name in holding.index and self.counts(number, entry.name)
            )
            ends = runs.whole + runs.length
            if runs.count != entry.tensor.count or (ends[:-1] > runs.whole[1:]).any():
                raise ValueError(f"{entry.name} is not covered once by what the ranks hold of it")

    def number(self, place: Place) -> int:
        """The holding of a rank."""
        return place.stage * self.grid.horizontal + place.part

    def of(self, place: Place) -> Holding:
        """The holding of a rank."""
        return self.holdings[self.number(place)]

    @cached_property
    def _holders(self) -> dict[tuple[str, Region], list[int]]:
        holders: dict[tuple[str, Region], list[int]] = {}
        for number, holding in enumerate(self.holdings):
            for entry in holding.index:
                holders.setdefault((entry.name, holding.region(entry.name)), []).append(number)
        return holders

    def holders(self, number: int, name: str) -> list[int]:
        """The holdings with the same elements of a tensor as this one, itself among them."""
        return self._holders[name, self.holdings[number].region(name)]

    def counts(self, number: int, name: str) -> bool:
        """Whether a sum over all ranks counts this holding's elements of a tensor, and not another holding's."""
        return self.holders(number, name)[0] == number

    def runs(self, number: int, start: int, stop: int, *, trained: bool, counted: bool) -> Runs:
        """Positions of elements of a holding in the canonical flat buffer and in its own.

        Parameters
        ----------
        number
            Index of the holding.
        start, stop
            Only elements [start, stop) of the canonical buffer.
        trained
            Only trained tensors, as in buffers of moments.
        counted
            Only elements that this holding counts (`counts`): over all holdings, every element of the model once.
        """
        parts = []
        for entry in self.holdings[number].index:
            if (trained and entry.tensor.group not in TRAINED) or (counted and not self.counts(number, entry.name)):
                continue
            model_entry = self.whole[entry.name]
            if model_entry.offset < stop and start < model_entry.end:
                runs = runs_of(model_entry.tensor.shape, self.holdings[number].region(entry.name))
                parts.append(runs.moved(model_entry.offset, entry.offset))
        return joined(parts).within_whole(start, stop)

    def to_json(self) -> dict[str, Any]:
        """As plain data, without the whole index and the grid: a run may resume with another number of replicas."""
        return {"holdings": [_plain(holding) for holding in self.holdings]}

    @classmethod
    def from_json(cls, whole: FlatIndex, data: Mapping[str, Any], grid: Grid) -> Division:
        """Load the result of `to_json`, on a grid of as many stages and parts."""
        return cls(whole, grid, tuple(_holding(holding) for holding in data["holdings"]))


def _plain(holding: Holding) -> dict[str, Any]:
    regions = {name: [region.axis, [list(span) for span in region.ranges]] for name, region in holding.regions.items()}
    return {"index": holding.index.to_json(), "regions": regions}


def _holding(data: Mapping[str, Any]) -> Holding:
    regions = {
        name: Region(axis, tuple((start, stop) for start, stop in ranges))
        for name, (axis, ranges) in data["regions"].items()
    }
    return Holding(FlatIndex.from_json(data["index"]), regions)


def folder_of(root: Path, part: int) -> Path:
    """Folder of a part's graphs, within that of the whole model's."""
    return root / f"part-{part}"
