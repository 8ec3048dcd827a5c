"""The position of each tensor in a flat buffer.

All parameters are in one flat fp32 buffer, all gradients in another, and each optimizer moment in another, so that a
gradient synchronisation is one collective call and a checkpoint a few large writes. The index is pure arithmetic: it
depends on no device and no framework, and is stored in the plan and in every checkpoint's manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ALIGNMENT = 64
"""Offsets are a multiple of this many elements: 256 bytes of fp32, for vectorised GPU kernels."""

Group = Literal["decay", "no_decay", "frozen", "state"]
GROUPS: tuple[Group, ...] = ("decay", "no_decay", "frozen", "state")
TRAINED: tuple[Group, ...] = ("decay", "no_decay")
"""The groups that the optimizer updates."""


@dataclass(frozen=True)
class Tensor:
    """A named fp32 tensor of a model, in one of the groups that are treated alike."""

    name: str
    shape: tuple[int, ...]
    group: Group

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A tensor and its position: elements [offset, offset + count) of the flat buffer."""

    tensor: Tensor
    offset: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor.name

    @property
    def end(self) -> int:
        """First element after the tensor."""
        return self.offset + self.tensor.count


class FlatIndex:
    """An ordered, aligned layout of tensors: trained ones first (decay, no_decay), then frozen, then state.

    State are tensors that the forward pass writes (running statistics), not the optimizer. Padding is always zero, in
    every buffer with this layout, including gradients and moments: norms are computed over whole buffers.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self._by_name = {entry.name: entry for entry in self.entries}

    @classmethod
    def place(cls, tensors: Iterable[Tensor]) -> FlatIndex:
        """Lay out the tensors, group by group, each in the given order."""
        tensors = list(tensors)
        entries: list[Entry] = []
        offset = 0
        for group in GROUPS:
            for tensor in tensors:
                if tensor.group == group:
                    entries.append(Entry(tensor, offset))
                    offset += _aligned(tensor.count)
        return cls(entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def size(self) -> int:
        """Elements of the whole buffer, including padding."""
        return _aligned(self.entries[-1].end) if self.entries else 0

    def span(self, *groups: Group) -> tuple[int, int]:
        """[start, end) of adjacent groups, including padding; (0, 0) if they are empty."""
        entries = [entry for entry in self.entries if entry.tensor.group in groups]
        if not entries:
            return (0, 0)
        return (entries[0].offset, _aligned(entries[-1].end))

    @property
    def trained(self) -> int:
        """Elements that the optimizer updates, including padding; they come first."""
        return self.span(*TRAINED)[1]

    def to_json(self) -> list[dict[str, Any]]:
        """The index as JSON-serialisable data."""
        return [
            {"name": e.name, "shape": list(e.tensor.shape), "group": e.tensor.group, "offset": e.offset}
            for e in self.entries
        ]

    @classmethod
    def from_json(cls, rows: Iterable[dict[str, Any]]) -> FlatIndex:
        """The index from data that `to_json` returned."""
        return cls([Entry(Tensor(r["name"], tuple(r["shape"]), r["group"]), r["offset"]) for r in rows])


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def share(size: int, rank: int, world: int) -> tuple[int, int]:
    """[start, end) of the shard of a flat buffer that `rank` of `world` holds: aligned, contiguous; all cover the
    buffer.
    """
    step = _aligned(-(-size // world))
    return (min(rank * step, size), min((rank + 1) * step, size))
