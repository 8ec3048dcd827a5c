"""Properties of operators that need no rule, and which of their inputs are weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from enum import Enum, auto


class Trait(Enum):
    """A property of an operator, by its name whatever the domain."""

    KEEPS_TYPE = auto()
    """Its result has the element type of its first input."""
    MOVES = auto()
    """It moves numbers without computing, so that they may be halves as well."""
    GIVES_SIZES = auto()
    """Graphs compute sizes with it."""
    HEAVY = auto()
    """No stage of a pipeline computes it again."""
    PASSES_STEEPNESS = auto()
    """Its gradient is infinite at an element if that of its output is."""
    FIRST_DIVIDED = auto()
    """Of its inputs the first alone is divided; the others are lists of sizes or indices, or parameters."""
    LINEAR = auto()
    """It multiplies its input with a weight."""
    LOOKS_UP = auto()
    """It looks up rows of its first input by the indices in its second."""


_OPERATORS: dict[Trait, set[str]] = defaultdict(set)
WEIGHTS: dict[str, Collection[int]] = {}
"""Operator -> its inputs that are weights whenever they are initializers."""
POSSIBLE_WEIGHTS: dict[str, Collection[int]] = {}
"""Operator -> its inputs that may be a parameter, but also a mask, a scale or a table."""


def describe(operators: Collection[str], *traits: Trait) -> None:
    """Enter properties of operators. None is entered twice."""
    for trait in traits:
        assert _OPERATORS[trait].isdisjoint(operators)
        _OPERATORS[trait].update(operators)


def weights(operators: Collection[str], *places: int) -> None:
    """Enter the inputs of operators that are weights. No operator is entered twice."""
    for operator in operators:
        assert operator not in WEIGHTS
        WEIGHTS[operator] = places


def possible_weights(operators: Collection[str], *places: int) -> None:
    """Enter the inputs of operators that may be weights. No operator is entered twice."""
    for operator in operators:
        assert operator not in POSSIBLE_WEIGHTS
        POSSIBLE_WEIGHTS[operator] = places


def having(trait: Trait) -> frozenset[str]:
    """Names of the operators that have a property."""
    return frozenset(_OPERATORS[trait])
