"""Finds what repeats in a sequence of segments, such as the layers of a transformer. Pure.

Called by `layer_marks` with one kind and one size for each segment of a model's trunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Span = tuple[int, int]
"""First segment of a layer, and the one after its last."""
SMALLEST = 3
"""Nodes of a layer, at least: recomputing fewer saves nothing."""


def repeated(kinds: Sequence[int], sizes: Sequence[int]) -> list[Span]:
    """The layers of a sequence, in its order.

    Runs of equal units are found first. Segments between two runs are layers too, and so are their neighbours on either
    side whose kinds occur there: a network for images begins each stage with a block that differs.

    Parameters
    ----------
    kinds
        Equal numbers for isomorphic segments.
    sizes
        Number of nodes of each segment.
    """
    units = _runs(kinds, sizes, 0, len(kinds))
    if not units:
        return []
    largest = max(sum(sizes[start:stop]) for start, stop in units)
    first, last = units[0][0], units[-1][1]
    kinds_of_layer = set(kinds[first:last])
    while first > 0 and kinds[first - 1] in kinds_of_layer:
        first -= 1
    while last < len(kinds) and kinds[last] in kinds_of_layer:
        last += 1
    spans: list[Span] = []
    at = first
    for start, stop in [*units, (last, last)]:
        spans += _packed(sizes, at, start, largest)
        spans += [(start, stop)] if stop > start else []
        at = stop
    return [span for span in spans if sum(sizes[slice(*span)]) >= SMALLEST]


def _runs(kinds: Sequence[int], sizes: Sequence[int], low: int, high: int) -> list[Span]:
    """Repeated units between two positions: the best run, and those on either side of it."""
    best: tuple[float, int, int, int] | None = None
    for period in range(1, (high - low) // 2 + 1):
        start = low
        while start + period < high:
            if kinds[start] != kinds[start + period]:
                start += 1
                continue
            stop = start
            while stop + period < high and kinds[stop] == kinds[stop + period]:
                stop += 1
            length = stop + period - start
            times = length // period
            if times > 1:
                offset = max(
                    range(length - times * period + 1),
                    key=lambda skipped: (sum(sizes[start + skipped : start + skipped + times * period]), -skipped),
                )
                score = _score(sum(sizes[start + offset : start + offset + period]), times)
                if score > 0 and (best is None or score > best[0]):
                    best = score, start + offset, period, times
            start = stop
    if best is None:
        return []
    _, start, period, times = best
    end = start + times * period
    units = [(at, at + period) for at in range(start, end, period)]
    return [*_runs(kinds, sizes, low, start), *units, *_runs(kinds, sizes, end, high)]


def _score(size: int, times: int) -> float:
    """Prefers many repeats: 12 blocks to 2 halves of 6, and the blocks of a residual stage to the stages."""
    return (times - 1) * math.sqrt(size) if size >= SMALLEST else 0.0


def _packed(sizes: Sequence[int], start: int, stop: int, largest: int) -> list[Span]:
    """Segments as few layers, none larger than `largest` unless a single segment is."""
    spans: list[Span] = []
    for at in range(start, stop):
        if spans and sum(sizes[spans[-1][0] : at + 1]) <= largest:
            spans[-1] = spans[-1][0], at + 1
        else:
            spans.append((at, at + 1))
    return spans
