"""A topological order of a graph some of whose nodes are joined: whether two of them may be joined as well. Pure.

Joined nodes become one node, which must not read what it computes. The order is kept up to date (Pearce and Kelly
2007): of a pair, only nodes between the two in this order can be on a path from one to the other. Positions in the
graph's list do not suffice for that: a path may lead through a joined node whose members lie before and behind the
pair.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Contraction:
    """Nodes by their positions in a sorted list; `before` has the positions of those that each reads from."""

    def __init__(self, before: Sequence[Collection[int]]) -> None:
        self._before = before
        self._order = [[place] for place in range(len(before))]
        """Members of the joined nodes, in topological order. Those that were joined with another are empty."""
        self._rank = list(range(len(before)))
        """Position of a node -> that of its joined node in the order."""

    def encloses(self, first: int, last: int) -> bool:
        """Whether a path leads from the joined node of `first` through a third one to that of `last`, which is behind.

        Then the two cannot be joined.
        """
        return self._between(first, last) is None

    def join(self, first: int, last: int) -> None:
        """Join the nodes of `first` and `last`. Raises ValueError if they enclose another."""
        start, stop, between = self._rank[first], self._rank[last], self._between(first, last)
        if between is None:
            raise ValueError(f"a path leads from node {first} through another one to node {last}")
        region = [rank for rank in range(start + 1, stop) if self._order[rank]]
        pieces = [self._order[rank] for rank in region if rank in between]
        pieces.append(self._order[start] + self._order[stop])
        pieces += [self._order[rank] for rank in region if rank not in between]
        pieces += [[] for _ in range(stop - start + 1 - len(pieces))]
        for rank, members in enumerate(pieces, start):
            self._order[rank] = members
            for member in members:
                self._rank[member] = rank

    def _between(self, first: int, last: int) -> set[int] | None:
        """Ranks between the two from which a path leads to `last`; None if one of the paths begins at `first`."""
        start, stop = self._rank[first], self._rank[last]
        if start > stop:
            raise ValueError(f"node {first} is behind node {last}")
        between: set[int] = set()
        waiting = [stop]
        while waiting:
            at = waiting.pop()
            for member in self._order[at]:
                for earlier in self._before[member]:
                    rank = self._rank[earlier]
                    if rank == start and at != stop:
                        return None
                    if start < rank < stop and rank not in between:
                        between.add(rank)
                        waiting.append(rank)
        return between
