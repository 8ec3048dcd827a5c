"""Values of calls in memory that captured graphs write as well. Used by `function`, `execution` and `captured`.

All sessions of a process allocate from one arena. A captured graph writes wherever it had memory when it was captured,
and the arena has given to others since what that graph only had in between: to calls that are queued node by node, and
to graphs that were captured later. What these have left there and is still read must not be there when the graph is
launched.
"""

from __future__ import annotations

import itertools
import math
import weakref

_OVERWRITTEN = (
    "a later call of the ORTModule has overwritten the values that this backward pass needs: it is the second one of a"
    " call (retain_graph=True); leave out cuda_graphs=True"
)


ARENA = object()
"""The memory of values that are only in the arena."""


class Lease:
    """What a call of the forward graph leaves for the backward pass."""

    def __init__(self) -> None:
        self.pending = True
        """No backward pass has read it."""
        self.memory: object = ARENA
        """The captured graph that has the values, or the arena."""
        self._valid = True

    def overwrite(self) -> None:
        """Called when the memory gets values of another call."""
        self._valid = False

    def check(self) -> None:
        """Raise RuntimeError if the values are not those of the call."""
        if not self._valid:
            raise RuntimeError(_OVERWRITTEN)


_captured: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Captured graph -> its place in the order of captures."""
_captures = itertools.count()
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def note_captured(graph: object) -> None:
    """Called when a graph of this process is captured."""
    _captured[graph] = next(_captures)


def note_forgotten(graph: object) -> None:
    """Called when a graph is not captured any more: its memory is the arena's."""
    _captured.pop(graph, None)


def any_captured() -> bool:
    """Whether results must be copied that a caller may keep."""
    return len(_captured) > 0


def note(lease: Lease, memory: object = ARENA) -> None:
    """Called with that of a call whose values are in this memory."""
    lease.memory = memory
    _leases.add(lease)


def overwrite(graph: object) -> None:
    """Called before a captured graph is launched: what is left of calls in its memory and the arena may not be read."""
    for lease in _written_by(graph):
        lease.overwrite()
        _leases.discard(lease)


def any_pending(graph: object) -> bool:
    """Whether a captured graph must not be launched, since a backward pass still reads what it writes."""
    return any(lease.pending for lease in _written_by(graph))


def _written_by(graph: object) -> list[Lease]:
    place = _captured.get(graph, math.inf)
    return [
        lease for lease in _leases if lease.memory in (ARENA, graph) or _captured.get(lease.memory, math.inf) > place
    ]
