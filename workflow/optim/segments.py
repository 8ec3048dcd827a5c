"""The slices of the flat buffer that an optimizer graph updates, each with one weight decay.

Called by `configure` to build the graph and by the trainer to bind it; both must get the same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortflow.workflow.layout import ALIGNMENT, FlatIndex
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Optimizer


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flat buffer, padding included: a multiple of `ALIGNMENT` elements."""

    start: int
    stop: int
    weight_decay: float

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece(Segment):
    """The part of a segment in a rank's shard, and the segment's number."""

    number: int


def pieces(whole: Sequence[Segment], start: int, stop: int) -> list[Piece]:
    """The part of each segment in elements [start, stop); segments without any are omitted."""
    clipped = (
        Piece(max(segment.start, start), min(segment.stop, stop), segment.weight_decay, number)
        for number, segment in enumerate(whole)
    )
    return [piece for piece in clipped if piece.start < piece.stop]


def segments(optimizer: Optimizer, index: FlatIndex) -> list[Segment]:
    """The trained part of the flat buffer, cut where `optimizer` treats it differently.

    A rule that uses norms of whole tensors (LAMB) has one segment per parameter, any other rule one per group. Frozen
    tensors and state are in no segment.
    """
    decays = {"decay": optimizer.weight_decay, "no_decay": 0.0}
    if OPTIMIZERS[optimizer.name].whole_tensors:
        return [
            Segment(entry.offset, -(-entry.end // ALIGNMENT) * ALIGNMENT, decays[entry.tensor.group])
            for entry in index
            if entry.tensor.group in decays and entry.tensor.count
        ]
    decayed, plain = index.span("decay"), index.span("no_decay")
    spans = ((*decayed, decays["decay"]), (*plain, decays["no_decay"]))
    return [Segment(start, stop, decay) for start, stop, decay in spans if stop > start]
