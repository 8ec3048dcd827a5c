"""Which cases of a long list a test runs: a few each time, and of the others a part that changes from commit to commit.

pytest FILE                              # those that always run
ORTFLOW_PART=3/7 pytest FILE             # also every seventh of the others, from the fourth on; .ci/run counts commits
pytest -m "chaos or not chaos" FILE      # all
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
PART = os.environ.get("ORTFLOW_PART", "")
OTHERS = (pytest.mark.chaos, pytest.mark.skipif("ORTFLOW_CHAOS" in os.environ, reason="not in a short round"))
"""Marks of the cases that a plain pytest and a short round of the chaos tests leave out."""


def rotating(names: Iterable[str], always: Collection[str], part: str = PART) -> list[Any]:
    """Parameters for `names`: those of the part and those in `always` are not marked.

    Raises
    ------
    ValueError
        If a name in `always` is none of `names`, or `part` is not K/N with 0 <= K < N.
    """
    names = list(names)
    if unknown := set(always) - set(names):
        raise ValueError(f"always run, but not in the list: {', '.join(sorted(unknown))}")
    others = [name for name in names if name not in always]
    chosen = {*always, *(others[place] for place in places(len(others), part))}
    return [pytest.param(name, id=name, marks=() if name in chosen else OTHERS) for name in names]


def piece(walk: Sequence[T], part: str = PART) -> Sequence[T]:
    """The part of a walk, whose last stop is the first of the next part; empty without a part."""
    if not part:
        return walk[:0]
    first, every = parsed(part)
    steps = len(walk) - 1
    return walk[steps * first // every : steps * (first + 1) // every + 1]


def places(count: int, part: str) -> range:
    """The part's places among `count`; none without a part."""
    if not part:
        return range(0)
    first, every = parsed(part)
    return range(first, count, every)


def parsed(part: str) -> tuple[int, int]:
    """K and N of K/N; raises ValueError for anything else."""
    first, slash, every = part.partition("/")
    if not (slash and first.isdecimal() and every.isdecimal() and int(first) < int(every)):
        raise ValueError(f"ORTFLOW_PART is {part!r}: give K/N with 0 <= K < N, such as 3/7")
    return int(first), int(every)
