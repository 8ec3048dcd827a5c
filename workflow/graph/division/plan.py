"""What has to change in a graph so that each part computes its share: the result of the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ortflow.workflow.graph.division.cut import Cut

Slot = tuple[int, int]
"""A node's place in the graph, and that of one of its inputs."""


@dataclass
class Plan:
    """Changes, by node or by input. Everything else computes on each part what it does undivided."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """Values of which each part has a share."""
    copies: set[Slot] = field(default_factory=set)
    """Undivided values that nodes read whole beside divided ones: their gradients are summed over the parts."""
    slices: dict[Slot, Cut] = field(default_factory=dict)
    """Undivided values of which a node reads this part's share."""
    sizes: dict[Slot, tuple[int, Cut]] = field(default_factory=dict)
    """Inputs that list sizes, whose element at a place is the length of a divided axis."""
    lists: dict[Slot, tuple[int, ...]] = field(default_factory=dict)
    """Inputs whose values are replaced: (lengths, starts or ends along a divided axis), each divided by the parts."""
    rows: dict[int, Cut] = field(default_factory=dict)
    """Products whose results are summed over the parts, and how what they read is divided."""
    sums: set[int] = field(default_factory=set)
    """ReduceSum nodes over a divided axis."""
    normal: dict[int, Cut] = field(default_factory=dict)
    """LogSoftmax nodes over a divided axis."""
    entropies: dict[int, Cut] = field(default_factory=dict)
    """SoftmaxCrossEntropyLoss nodes over divided classes."""
    lookups: dict[int, Cut] = field(default_factory=dict)
    """Gather nodes of tables whose rows are divided."""
    heads: list[int] = field(default_factory=list)
    """Lengths of the axes that widths are taken apart into."""
    gathered: dict[str, Cut] = field(default_factory=dict)
    """Divided values that are put together behind the node that makes them."""

    def add(self, other: Plan) -> None:
        """Take over another one's changes."""
        maps = ("cuts", "slices", "sizes", "lists", "rows", "normal", "entropies", "lookups", "gathered")
        for name in maps:
            getattr(self, name).update(getattr(other, name))
        self.copies |= other.copies
        self.sums |= other.sums

    def changed(self) -> Iterator[int]:
        """Places of the nodes that change, some several times."""
        for slots in (self.copies, self.slices, self.sizes, self.lists):
            yield from (place for place, _ in slots)
        for places in (self.rows, self.sums, self.normal, self.entropies, self.lookups):
            yield from places
