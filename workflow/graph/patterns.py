"""Glob patterns of the run file over names of tensors: matches, and suggestions for a pattern that matches nothing.

Called by `roles` and `assembly`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator

from ortflow.workflow.errors import UserError

_NEAR = 0.6
_SHOWN = 3


def matches(pattern: str, names: Collection[str], location: str, noun: str) -> list[str]:
    """The names that a pattern matches, in their order.

    Raises UserError, which suggests the nearest names, if there is no match; `noun` says what the names are.
    """
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        near = nearest(pattern, names)
        raise UserError(
            f"the pattern {pattern!r} matches no {noun}",
            where=location,
            fix=f"did you mean {' or '.join(map(repr, near))}?" if near else "`ortflow inspect` lists them",
        )
    return matching


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """The patterns nearest to one that matches nothing, best first: names, or parts of names with its asterisks."""
    before, after = pattern.startswith("*"), pattern.endswith("*")
    stem = pattern.strip("*").strip("./").lower()
    ratios: dict[str, float] = {}
    for name in names:
        for start, end in _parts(name, before, after):
            part = name[start:end]
            ratio = difflib.SequenceMatcher(None, stem, part.strip("./").lower()).ratio()
            if ratio >= _NEAR:
                wild = f"{'*' if before and start else ''}{part}{'*' if after and end < len(name) else ''}"
                ratios[wild] = max(ratio, ratios.get(wild, 0))
    return sorted(ratios, key=lambda wild: (-ratios[wild], len(wild), wild))[:_SHOWN]


def _parts(name: str, before: bool, after: bool) -> Iterator[tuple[int, int]]:
    """Start and end of the parts of a name that a pattern with asterisks before or after it may have meant."""
    bounds = [match.start() for match in re.finditer(r"[./]", name)]
    starts = [0, *bounds] if before else [0]
    ends = [*(bound + 1 for bound in bounds), len(name)] if after else [len(name)]
    yield from ((start, end) for start in starts for end in ends if start < end - 1)
