"""How a value is divided: along one axis, block by block. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ortflow.workflow.parallel.region import Region


class Unsupported(Exception):
    """Raised if no rule says how this node handles divided values; the message says where."""


class Indivisible(Unsupported):
    """Raised if a size is not a multiple of the number of parts."""

    def __init__(self, length: int, parts: int, seed: int | None = None) -> None:
        super().__init__(f"{length} is not divisible by {parts}")
        self.length, self.seed = length, seed


class Reblock(Exception):
    """Raised if the columns of a weight seem to consist of several blocks, such as packed queries, keys and values."""

    def __init__(self, seed: int, blocks: tuple[int, ...]) -> None:
        super().__init__(f"{blocks}")
        self.seed, self.blocks = seed, blocks


@dataclass(frozen=True)
class Cut:
    """Each part has a share of every block along the axis."""

    axis: int
    blocks: tuple[int, ...]
    """Sizes of the blocks. Each is divided evenly, except a single block (a vocabulary)."""
    seed: int | None = field(default=None, compare=False)
    """Index of the node whose columns these are, as long as the axis contains nothing else."""
    varies: bool = False
    """Whether the number of blocks varies (a batch of heads): the blocks are those of a trial."""

    @property
    def length(self) -> int:
        """Size of the whole axis."""
        return sum(self.blocks)

    def at(self, axis: int) -> Cut:
        """The same cut along another axis."""
        return replace(self, axis=axis)

    def is_even(self, parts: int) -> bool:
        """Whether all parts have the same size."""
        return not any(block % parts for block in self.blocks)

    def region(self, part: int, parts: int) -> Region:
        """The ranges that a part has."""
        ranges = []
        start = 0
        for block in self.blocks:
            first, last = block * part // parts, block * (part + 1) // parts
            ranges.append((start + first, start + last))
            start += block
        return Region(self.axis, tuple(ranges))

    def local(self, part: int, parts: int) -> int:
        """A part's size along the axis."""
        return sum(stop - start for start, stop in self.region(part, parts).ranges)


def even(axis: int, blocks: Sequence[int], parts: int, seed: int | None = None) -> Cut:
    """A cut into equal parts. Raises Indivisible."""
    for block in blocks:
        if block % parts:
            raise Indivisible(block, parts, seed)
    return Cut(axis, tuple(blocks), seed)


def reshaped(cut: Cut, old: Sequence[int], new: Sequence[int], parts: int, *, propose: bool = True) -> Cut:
    """The cut after a Reshape from one shape to another.

    The elements of each part must be a share of the new shape along one axis. Raises Unsupported; Indivisible if the
    number of parts is the reason; and, with `propose`, Reblock if columns must first be split into two or three blocks.
    """
    start, first, group_old, group_new = _group(cut.axis, old, new)
    place = cut.axis - first
    if [size for size in group_old if size != 1] == [size for size in group_new if size != 1] and cut.length != 1:
        # Axes of length 1 are added or removed.
        moved = [i for i, size in enumerate(group_new) if size != 1]
        nth = len([size for size in group_old[:place] if size != 1])
        return cut.at(start + moved[nth])
    if len(set(cut.blocks)) > 1:
        raise Unsupported("blocks of unequal lengths are reshaped")
    # Rows of the group that are divided alike, one after the other.
    outer = math.prod(group_old[:place]) * len(cut.blocks)
    if propose and cut.seed is not None and len(cut.blocks) == 1 and group_new[0] in (2, 3) and len(group_new) > 2:
        raise Reblock(cut.seed, (cut.length // group_new[0],) * group_new[0])
    before = 1
    for axis, size in enumerate(group_new):
        if before * size > outer:
            if outer % before or size % (outer // before):
                raise Unsupported("a Reshape mixes the parts")
            blocks = outer // before
            if size // blocks % parts:
                raise Indivisible(size // blocks, parts, cut.seed)
            return Cut(start + axis, (size // blocks,) * blocks)
        before *= size
    raise Unsupported("a Reshape mixes the parts")


def _group(axis: int, old: Sequence[int], new: Sequence[int]) -> tuple[int, int, list[int], list[int]]:
    """The smallest groups of adjacent axes with the same number of elements, with `axis` in the old one; and the index
    at which they begin in the new and the old shape.
    """
    i = j = 0
    while i < len(old) or j < len(new):
        first_old, first_new = i, j
        of_old, of_new = old[i : i + 1], new[j : j + 1]
        i, j = i + 1, j + 1
        while math.prod(of_old) != math.prod(of_new):
            if math.prod(of_old) < math.prod(of_new) and i < len(old):
                i += 1
            elif j < len(new):
                j += 1
            else:
                raise Unsupported("a Reshape whose shapes do not match")
            of_old, of_new = old[first_old:i], new[first_new:j]
        # Axes of length 1 after a group belong to it.
        while i < len(old) and old[i] == 1 and (j >= len(new) or new[j] != 1):
            i += 1
        while j < len(new) and new[j] == 1 and (i >= len(old) or old[i] != 1):
            j += 1
        if first_old <= axis < i:
            return first_new, first_old, list(old[first_old:i]), list(new[first_new:j])
    raise Unsupported("a Reshape whose shapes do not match")
