"""Operators of `ortflow.cuda` that Python runs, by their names in model files: each family registers its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ortflow.workflow.cuda.call import Operator

OPERATORS: dict[str, type[Operator]] = {}
HALF: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
"""Operator -> positions of the inputs, and of the outputs, that may be fp16 or bf16, each independently."""
HALF_ONLY: set[str] = set()
"""Operators of `HALF` that are placed only for half precision: all values that may be half are."""
_Kind = TypeVar("_Kind", bound=type[Operator])


def operator(
    *, half_inputs: Iterable[int] = (), half_outputs: Iterable[int] = (), half_only: bool = False
) -> Callable[[_Kind], _Kind]:
    """Return a decorator that registers a class under its own name.

    Parameters
    ----------
    half_inputs, half_outputs
        See HALF.
    half_only
        See HALF_ONLY.
    """
    places = frozenset(half_inputs), frozenset(half_outputs)

    def enter(kind: _Kind) -> _Kind:
        name = kind.__name__
        assert name not in OPERATORS
        OPERATORS[name] = kind
        if any(places):
            HALF[name] = places
        if half_only:
            HALF_ONLY.add(name)
        return kind

    return enter
