"""The slices of the flat buffer that an optimizer graph updates, each with one weight decay and one learning rate.

Called by `configure` to build the graph and by the trainer to bind it; both must get the same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ortflow.workflow.layout import ALIGNMENT, FlatIndex
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Optimizer
from ortflow.workflow.spec.train import TrainSection
from ortflow.workflow.spec.treatments import PLAIN, Treat, treatment_of


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flat buffer, padding included: a multiple of `ALIGNMENT` elements."""

    start: int
    stop: int
    weight_decay: float
    lr_scale: float = field(default=1.0, kw_only=True)
    """Factor of the learning rate."""
    frozen: int | None = field(default=None, kw_only=True)
    """Number of the run file's group that is not updated at first; None if there is none."""
    shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Shape of the parameter, where the rule reads it; None too for what Muon leaves to AdamW."""
    averaged: bool = field(default=False, kw_only=True)
    """Whether the update also writes the average of the parameters."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece(Segment):
    """The part of a segment in a rank's shard, and the segment's number."""

    number: int


AnySegment = TypeVar("AnySegment", bound=Segment)


def pieces(whole: Sequence[Segment], start: int, stop: int) -> list[Piece]:
    """The part of each segment in elements [start, stop); segments without any are omitted."""
    clipped = (
        Piece(
            max(segment.start, start), min(segment.stop, stop), segment.weight_decay, number,
            lr_scale=segment.lr_scale, frozen=segment.frozen, averaged=segment.averaged, shape=segment.shape,
        )
        for number, segment in enumerate(whole)
    )  # fmt: skip
    return [piece for piece in clipped if piece.start < piece.stop]


def segments_of(train: TrainSection, index: FlatIndex) -> list[Segment]:
    """The segments of a run."""
    cuts = segments(train.optimizer, index, treatment_of(train))
    return cuts if train.average is None else [replace(cut, averaged=True) for cut in cuts]


def by_thaw(cuts: Sequence[AnySegment]) -> dict[int | None, list[AnySegment]]:
    """Segments by the group that is frozen at first; those of no such group under None."""
    groups: dict[int | None, list[AnySegment]] = {}
    for cut in cuts:
        groups.setdefault(cut.frozen, []).append(cut)
    return groups


def segments(optimizer: Optimizer, index: FlatIndex, treat: Treat = lambda name: PLAIN) -> list[Segment]:
    """The trained part of the flat buffer, cut where `optimizer` treats it differently.

    A rule that uses norms of whole tensors (LAMB) has one segment per parameter, any other rule one per group. Frozen
    tensors and state are in no segment. `treat` tells what is special about a parameter.
    """
    decays = {"decay": optimizer.weight_decay, "no_decay": 0.0}
    properties = OPTIMIZERS[optimizer.name]
    result: list[Segment] = []
    for entry in index:
        if entry.tensor.group not in decays or not entry.tensor.count:
            continue
        special = treat(entry.name)
        decay = decays[entry.tensor.group]
        if entry.tensor.group == "decay" and special.weight_decay is not None:
            decay = special.weight_decay
        stop = -(-entry.end // ALIGNMENT) * ALIGNMENT
        shape, scale = entry.tensor.shape if properties.shapes else None, special.lr_scale
        if optimizer.name == "muon" and not optimizer.has(entry.name, entry.tensor.shape):
            shape, scale = None, scale if special.own_lr else scale * optimizer.adamw_lr / optimizer.lr
        segment = Segment(entry.offset, stop, decay, lr_scale=scale, frozen=special.frozen, shape=shape)
        if not properties.whole_tensors and result and _alike(result[-1], segment, index):
            result[-1] = replace(result[-1], stop=stop)
        else:
            result.append(segment)
    return result


def _alike(segment: Segment, following: Segment, index: FlatIndex) -> bool:
    """Whether two segments that follow each other are updated alike; decay and no decay stay apart, even if it is 0."""
    edge = index.span("no_decay")[0]
    alike = (segment.weight_decay, segment.lr_scale, segment.frozen) == (
        following.weight_decay,
        following.lr_scale,
        following.frozen,
    )
    return alike and following.start != edge
