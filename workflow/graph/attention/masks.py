"""Masks of attention: proved to be causal, or passed on as computed.

Called by `attention`. A mask is split into conditions that must all hold and numbers that are all added.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from ortflow.workflow.graph.attention.operands import Unfused, View
from ortflow.workflow.graph.attention.proof import is_floating

LOW = -1e4
"""A number added to a score that acts as minus infinity: its exponential is 0 in fp32."""


@dataclass(frozen=True)
class Condition:
    """A Boolean value. A query attends to a key where it is true or, if `negated`, where it is false."""

    value: str
    negated: bool = False


@dataclass
class Mask:
    """Which keys a query attends to, and what is added to its scores."""

    causal: bool = False
    """No query attends to a later key."""
    conditions: list[Condition] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def is_certain(self) -> bool:
        """Whether every query certainly attends to at least one key."""
        return not self.conditions and not self.added


class Masks:
    """The masks of a graph. `varying` are the values that need a gradient."""

    def __init__(self, view: View, varying: Collection[str]) -> None:
        self._view, self._varying = view, varying
        self._kinds: dict[tuple[Condition, tuple[str, str]], str] = {}

    def of(self, added: Sequence[str], conditions: Sequence[Condition], tokens: tuple[str, str]) -> Mask:
        """The mask of scores to which `added` is added where all `conditions` hold. Raises Unfused.

        `tokens` are the scores' last two sizes, as names or as numbers written as text.
        """
        mask = Mask()
        for name in added:
            self._add(mask, name, tokens)
        for condition in conditions:
            self._require(mask, condition, tokens)
        return mask

    def _require(self, mask: Mask, condition: Condition, tokens: tuple[str, str]) -> None:
        value, negated = condition.value, condition.negated
        node = self._view.maker(value)
        if node is not None and (self._view.alias(node) or node.op_type == "Expand"):
            return self._require(mask, Condition(node.input[0], negated), tokens)
        if node is not None and node.op_type == "Not":
            return self._require(mask, Condition(node.input[0], not negated), tokens)
        if node is not None and node.op_type == ("Or" if negated else "And"):
            for name in node.input:
                self._require(mask, Condition(name, negated), tokens)
            return None
        kind = self._kind(condition, tokens)
        if kind == "causal":
            mask.causal = True
        elif kind != "open" and condition not in mask.conditions:
            mask.conditions.append(condition)
        return None

    def _kind(self, condition: Condition, tokens: tuple[str, str]) -> str:
        key = condition, tokens
        if key not in self._kinds:
            self._kinds[key] = "unknown"
            if self._view.proof.is_constant(condition.value):
                arrays = [a != condition.negated for a in self._view.proof.values(condition.value, tokens)]
                self._kinds[key] = kind_of(arrays)
        return self._kinds[key]

    def _add(self, mask: Mask, name: str, tokens: tuple[str, str]) -> None:
        view = self._view
        node = view.maker(name)
        if name in self._varying:
            raise Unfused("what is added to its scores has a gradient")
        if node is not None and (view.alias(node) or node.op_type == "Expand"):
            return self._add(mask, node.input[0], tokens)
        if node is not None and node.op_type == "Add":
            for name_read in node.input:
                self._add(mask, name_read, tokens)
            return None
        if node is not None and node.op_type == "Where":
            condition, yes, no = node.input
            for value, fill, negated in ((yes, no, False), (no, yes, True)):
                if self.is_low(fill):
                    self._require(mask, Condition(condition, negated), tokens)
                    if view.proof.number(value) != 0:
                        self._add(mask, value, tokens)
                    return None
        if view.proof.is_constant(name):
            arrays = view.proof.values(name, tokens)
            if arrays and all(((a == 0) | (a <= LOW)).all() for a in arrays):
                kind = kind_of([a == 0 for a in arrays])
                if kind != "unknown":
                    mask.causal = mask.causal or kind == "causal"
                    return None
        if not is_floating(view.types, name):
            raise Unfused("what is added to its scores is not of fp32")
        mask.added.append(name)
        return None

    def is_low(self, value: str) -> bool:
        """Whether a number acts as minus infinity on a score."""
        number = self._view.proof.number(value)
        return number is not None and number <= LOW


def kind_of(arrays: Sequence[np.ndarray]) -> str:
    """`open` if all elements are true, `causal` if exactly the lower triangle is true, else `unknown`."""
    if not arrays:
        return "unknown"
    if all(array.all() for array in arrays):
        return "open"
    return "causal" if all(map(_is_triangle, arrays)) else "unknown"


def _is_triangle(array: np.ndarray) -> bool:
    # With a single row, `causal` and `open` cannot be distinguished.
    if array.ndim < 2 or min(array.shape[-2:]) < 2:
        return False
    return np.array_equal(array, np.broadcast_to(np.tri(*array.shape[-2:]) == 1, array.shape))
