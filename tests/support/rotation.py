"""Which cases of a long list a test runs: a few each time, and of the others a part.

pytest FILE                              # those that always run
ORTFLOW_PART=3/7 pytest FILE             # also every seventh of the others, from the fourth on; see .ci/tree
pytest -m "chaos or not chaos" FILE      # all

Of tests with the mark `rotates`, pytest runs all cases, and .ci/run a fifth:

ORTFLOW_CASES=1/5 pytest FILE            # every fifth case of a test, from the second on, and at least one

Of tests that run a second time, on another ONNX Runtime and CPython, .ci/run runs a seventh:

ORTFLOW_AGAIN=1/7 pytest FILE            # every seventh test of a file, from the second on, and at least one
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import longest_first
import pytest

T = TypeVar("T")
PART = os.environ.get("ORTFLOW_PART", "")
CASES = os.environ.get("ORTFLOW_CASES", "")
AGAIN = os.environ.get("ORTFLOW_AGAIN", "")
"""Another N than that of `CASES`, whose K is that of the same tree: else some cases would never run."""
ROTATED = pytest.StashKey[bool]()
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


def left_out(groups: Sequence[str | None], part: str = CASES, variable: str = "ORTFLOW_CASES") -> set[int]:
    """Places of the cases that another part has.

    Parameters
    ----------
    groups
        Of each case: the name of those among which it rotates, None if it always runs.
    part
        K/N: of each group every Nth case runs, from the Kth on; one if it has fewer than N. Empty: all.
    """
    if not part:
        return set()
    first, every = parsed(part, variable)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        if group is not None:
            members[group].append(place)
    skipped = set()
    for found in members.values():
        step = min(every, len(found))
        skipped |= set(found) - set(found[first % step :: step])
    return skipped


def parsed(part: str, variable: str = "ORTFLOW_PART") -> tuple[int, int]:
    """K and N of K/N; raises ValueError for anything else."""
    first, slash, every = part.partition("/")
    if not (slash and first.isdecimal() and every.isdecimal() and int(first) < int(every)):
        raise ValueError(f"{variable} is {part!r}: give K/N with 0 <= K < N, such as 3/7")
    return int(first), int(every)


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of tests marked `rotates`, and the tests of each file, that another part has.

    Several conftest files may call it.

    Where durations are recorded, the longest files then come first.
    """
    if config.stash.get(ROTATED, False):
        return
    config.stash[ROTATED] = True
    _leave_out(config, items, left_out([_group_of(item) for item in items]))
    files = [item.nodeid.partition("::")[0] for item in items]
    _leave_out(config, items, left_out(files, AGAIN, "ORTFLOW_AGAIN"))
    longest_first.order(items, longest_first.recorded_seconds())


def _leave_out(config: pytest.Config, items: list[pytest.Item], skipped: set[int]) -> None:
    config.hook.pytest_deselected(items=[items[place] for place in skipped])
    items[:] = [item for place, item in enumerate(items) if place not in skipped]


def _group_of(item: pytest.Item) -> str | None:
    """The group that the mark names, or the cases of the test."""
    mark = item.get_closest_marker("rotates")
    return None if mark is None else str(mark.args[0]) if mark.args else item.nodeid.partition("[")[0]
