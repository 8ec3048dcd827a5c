"""The result of the search: what changes in a graph so that each part computes its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ortflow.workflow.graph.rules.cut import Cut

Slot = tuple[int, int]
"""Index of a node in the graph, and of one of its inputs."""


@dataclass
class Plan:
    """Changes, by node or by input. Everything else is computed on each part as in the undivided graph."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """Values of which each part has a share."""
    copies: set[Slot] = field(default_factory=set)
    """Undivided values that nodes read whole beside divided ones: their gradients are summed over the parts."""
    slices: dict[Slot, Cut] = field(default_factory=dict)
    """Undivided values of which a node reads this part's share."""
    sizes: dict[Slot, tuple[int, Cut]] = field(default_factory=dict)
    """Inputs that list sizes, and the element that is the size of a divided axis."""
    lists: dict[Slot, tuple[int, ...]] = field(default_factory=dict)
    """Inputs whose values are replaced (sizes, starts or ends along a divided axis); each is divided by the parts."""
    rows: dict[int, Cut] = field(default_factory=dict)
    """Products whose results are summed over the parts, and how their inputs are divided."""
    sums: set[int] = field(default_factory=set)
    """ReduceSum nodes over a divided axis."""
    normal: dict[int, Cut] = field(default_factory=dict)
    """LogSoftmax nodes over a divided axis."""
    entropies: dict[int, Cut] = field(default_factory=dict)
    """SoftmaxCrossEntropyLoss nodes over divided classes."""
    lookups: dict[int, Cut] = field(default_factory=dict)
    """Gather nodes of tables whose rows are divided."""
    heads: list[int] = field(default_factory=list)
    """Sizes of the blocks that columns are split into."""
    gathered: dict[str, Cut] = field(default_factory=dict)
    """Divided values that are gathered after the node that computes them."""

    def add(self, other: Plan) -> None:
        """Add the changes of another plan."""
        maps = ("cuts", "slices", "sizes", "lists", "rows", "normal", "entropies", "lookups", "gathered")
        for name in maps:
            getattr(self, name).update(getattr(other, name))
        self.copies |= other.copies
        self.sums |= other.sums

    def changed(self) -> Iterator[int]:
        """Indices of the nodes that change, possibly repeated."""
        for slots in (self.copies, self.slices, self.sizes, self.lists):
            yield from (place for place, _ in slots)
        for places in (self.rows, self.sums, self.normal, self.entropies, self.lookups):
            yield from places
