"""Simulates ONNX Runtime's arena: how much memory it takes from the system for a sequence of allocations. Pure.

Best fit among free pieces. A freed piece is merged with free neighbours, and a piece is split unless less than half of
it would remain. If no piece fits, the arena allocates a new region of the requested size. `sessions` configures every
device this way.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

UNIT = 256
"""Sizes are rounded up to a multiple of this, in bytes."""
DEAD = 128 << 20
"""A piece is always split if at least this many bytes remain."""


@dataclass(eq=False)
class _Piece:
    start: int
    size: int
    free: bool = False
    before: _Piece | None = None
    after: _Piece | None = None


@dataclass
class Arena:
    """An arena that is empty at first."""

    reserved: int = 0
    """Bytes of all regions."""
    _regions: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)
    """Size and start of free pieces, sorted."""
    _pieces: dict[int, _Piece] = field(default_factory=dict)

    def take(self, size: int) -> int:
        """Allocate memory; returns its address."""
        needed_size = max(1, -(-size // UNIT)) * UNIT
        place = bisect.bisect_left(self._free, (needed_size, -1))
        piece = self._pieces[self._free[place][1]] if place < len(self._free) else self._extended(needed_size)
        self._hide(piece)
        if piece.size >= 2 * needed_size or piece.size - needed_size >= DEAD:
            self._split(piece, needed_size)
        return piece.start

    def give(self, address: int) -> None:
        """Free memory."""
        piece = self._pieces[address]
        after, before = piece.after, piece.before
        if after is not None and after.free:
            self._hide(after)
            self._join(piece, after)
        if before is not None and before.free:
            self._hide(before)
            self._join(before, piece)
            piece = before
        self._show(piece)

    def _extended(self, size: int) -> _Piece:
        # Regions are not adjacent: pieces of two regions are never merged.
        piece = _Piece(self.reserved + self._regions * UNIT, size)
        self.reserved += size
        self._regions += 1
        self._pieces[piece.start] = piece
        self._show(piece)
        return piece

    def _show(self, piece: _Piece) -> None:
        piece.free = True
        bisect.insort(self._free, (piece.size, piece.start))

    def _hide(self, piece: _Piece) -> None:
        piece.free = False
        del self._free[bisect.bisect_left(self._free, (piece.size, piece.start))]

    def _split(self, piece: _Piece, needed_size: int) -> None:
        rest = _Piece(piece.start + needed_size, piece.size - needed_size, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.size = rest, needed_size
        self._pieces[rest.start] = rest
        self._show(rest)

    def _join(self, piece: _Piece, after: _Piece) -> None:
        piece.size += after.size
        piece.after = after.after
        if after.after is not None:
            after.after.before = piece
        del self._pieces[after.start]
