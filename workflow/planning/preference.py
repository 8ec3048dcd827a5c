"""The order in which layouts are listed. Pure.

Predicted seconds of a step are off by up to a sixth (docs/parallel.md), so they do not order layouts that are closer to
each other: of these, the one that changes least about the model and the messages is first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortflow.workflow.planning.survey import Candidate

EQUAL = 1.15
"""Largest ratio of predicted seconds that are taken for equal."""


def ordered(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The fastest first; those within `EQUAL` of the fastest of the rest by simplicity, then seconds, then memory."""
    rest = sorted(candidates, key=_cost)
    ranking: list[Candidate] = []
    while rest:
        limit = EQUAL * rest[0].time.total
        equal = [candidate for candidate in rest if candidate.time.total <= limit]
        ranking += sorted(equal, key=lambda candidate: (_divisions(candidate), _cost(candidate)))
        rest = rest[len(equal) :]
    return tuple(ranking)


def _cost(candidate: Candidate) -> tuple[float, float]:
    return candidate.time.total, candidate.memory.total


def _divisions(candidate: Candidate) -> tuple[bool, bool, bool, int]:
    """Layers that are cut, a model that is cut, activations computed twice, and how much of the state is sharded."""
    layout = candidate.layout
    return layout.horizontal > 1, layout.pipeline > 1, candidate.recompute is not None, layout.zero
