"""Values of calls in memory that captured graphs write as well. Used by `function`, `execution` and `captured`.

All sessions of a process allocate from one arena. A captured graph writes wherever it had memory when it was captured,
and the arena has given to others since what that graph only had in between. What is in the arena and is still read must
not be there when such a graph is launched.
"""

from __future__ import annotations

import weakref

_OVERWRITTEN = (
    "a later call of the ORTModule has overwritten the values that this backward pass needs: it is the second one of a"
    " call (retain_graph=True); leave out cuda_graphs=True"
)


class Lease:
    """What a call of the forward graph leaves for the backward pass."""

    def __init__(self) -> None:
        self.pending = True
        """No backward pass has read it."""
        self._valid = True

    def overwrite(self) -> None:
        """Called when the memory gets values of another call."""
        self._valid = False

    def check(self) -> None:
        """Raise RuntimeError if the values are not those of the call."""
        if not self._valid:
            raise RuntimeError(_OVERWRITTEN)


_captured: weakref.WeakSet[object] = weakref.WeakSet()
_in_arena: weakref.WeakSet[Lease] = weakref.WeakSet()


def note_captured(graph: object) -> None:
    """Called when a graph of this process is captured."""
    _captured.add(graph)


def any_captured() -> bool:
    """Whether results must be copied that a caller may keep."""
    return len(_captured) > 0


def note_queued(lease: Lease) -> None:
    """Called with that of a call whose values are in the arena."""
    _in_arena.add(lease)


def overwrite_arena() -> None:
    """Called before a captured graph is launched: what is left of calls in the arena may not be read again."""
    for lease in _in_arena:
        lease.overwrite()
    _in_arena.clear()


def any_pending() -> bool:
    """Whether a captured graph must not be launched, since a backward pass still reads values in the arena."""
    return any(lease.pending for lease in _in_arena)
