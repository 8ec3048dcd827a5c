"""Where the elements of tensors lie when ranks share the flat buffer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ortflow.workflow.layout import Entry, share


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, which one rank holds."""

    rank: int
    tensor: int
    """Index of the tensor among the requested ones."""
    start: int
    stop: int
    offset: int
    """Offset of its first element in the flat buffer."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def pieces_of(entries: Sequence[Entry], size: int, ranks: int) -> list[Piece]:
    """All elements of the tensors, ordered by the ranks that hold them, each once.

    Parameters
    ----------
    entries
        The tensors, all of them in the first `size` elements of the flat buffer.
    size
        Elements that the ranks share: rank r has `layout.share` r.
    ranks
        Number of ranks.
    """
    pieces = []
    for rank in range(ranks):
        start, stop = share(size, rank, ranks)
        for place, entry in enumerate(entries):
            first, last = max(start, entry.offset), min(stop, entry.end)
            if first < last:
                pieces.append(Piece(rank, place, first - entry.offset, last - entry.offset, first))
    return pieces


def batches(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """The pieces in order, grouped into messages of at most `size` elements, each from one rank."""
    batch: list[Piece] = []
    room = size
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if batch and (not room or batch[0].rank != piece.rank):
                yield batch
                batch, room = [], size
            stop = min(piece.stop, start + room)
            batch.append(Piece(piece.rank, piece.tensor, start, stop, piece.offset + start - piece.start))
            room -= stop - start
            start = stop
    if batch:
        yield batch
