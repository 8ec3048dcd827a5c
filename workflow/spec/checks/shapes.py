"""What plain data must look like: a few words for its shape, and what differs from one. Pure.

Called for values that the run file passes on as Kubernetes writes them. A shape is a type (`str`, `int`, `bool`), a
set of words, a list with the shape of its items, a dict with the shape of its keys (`key!` has to be there, `*` stands
for any other key), a function that says what is wrong with a value, or `ANY`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ortflow.workflow.spec.problem import KeyPath, Problem, listed, nearest, shown

Shape = Any
ANY = object()

_TYPES: dict[Any, str] = {str: "text", int: "a whole number", bool: "true or false"}


def check_shape(value: Any, shape: Shape, path: KeyPath) -> Iterator[Problem]:
    """Where a value differs from its shape."""
    if shape is ANY:
        return
    if isinstance(shape, dict):
        yield from _check_keys(value, shape, path)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield Problem(path, f"must be a list, not {shown(value)}")
            return
        for place, item in enumerate(value):
            yield from check_shape(item, shape[0], (*path, place))
    elif isinstance(shape, frozenset):
        if not isinstance(value, str) or value not in shape:
            words = sorted(filter(None, shape))
            near = nearest(value, words) if isinstance(value, str) else None
            yield Problem(
                path, f"must be {listed(words)}, not {shown(value)}", f"did you mean {near}?" if near else None
            )
    elif isinstance(shape, type):
        if not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
            yield Problem(path, f"must be {_TYPES[shape]}, not {shown(value)}")
    elif wrong := shape(value):
        yield Problem(path, wrong)


def _check_keys(value: Any, shape: dict[str, Shape], path: KeyPath) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(path, f"must be a section of keys, not {shown(value)}")
        return
    known = {name.rstrip("!"): below for name, below in shape.items()}
    for name in shape:
        if name.endswith("!") and value.get(name[:-1]) in (None, ""):
            yield Problem((*path, name[:-1]), "is missing")
    for key, below in value.items():
        if key in known:
            yield from check_shape(below, known[key], (*path, key))
        elif "*" in known:
            yield from check_shape(below, known["*"], (*path, key))
        else:
            meant = nearest(key, known)
            fix = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
            yield Problem((*path, key), "unknown key", fix)


def words(text: str) -> frozenset[str]:
    """One of these words."""
    return frozenset(text.split())
