"""Finds what is computed on a share of the tokens: norms, dropout and additions between divided layers.

This is the sequence parallelism of Korthikanti et al. 2022. Works on the graph of a part. The sum behind a divided
layer becomes a reduce-scatter over tokens, and what the next layer reads is gathered. `sequence_graph` writes it.

A share of a value has 1 / parts of its tokens, which are its first axes: [batch, tokens, width] becomes
[1, tokens of the share, width], [tokens, width] becomes [tokens of the share, width].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.registry import registered_in
from ortflow.workflow.graph.rules.division_plan import Slot
from ortflow.workflow.graph.rules.facts import Facts

Shares = Sequence[int | None]
"""The axes of tokens of a node's inputs or outputs; None for a whole one."""
Rule = Callable[["Search", int, onnx.NodeProto, Shares], Shares]
RULES: dict[tuple[str, str], Rule] = {}
"""(Domain, operator) -> its rule for inputs of which it reads a share. A rule raises Whole if it does not apply."""
_MOST_AXES = 2
"""Axes of tokens: those of all samples in one, or the batch and the sequence."""


class Whole(Exception):
    """Raised if a node needs whole values."""


@dataclass
class Found:
    """The results of the search."""

    axes: dict[str, int] = field(default_factory=dict)
    """Values of which a part has a share -> their number of axes of tokens."""
    nodes: set[int] = field(default_factory=set)
    """Nodes computed on a share."""
    sums: set[int] = field(default_factory=set)
    """All-reduces that become reduce-scatters."""
    sliced: dict[Slot, int] = field(default_factory=dict)
    """Whole inputs of which a node reads a share -> axes of tokens of the node's result."""
    copied: set[Slot] = field(default_factory=set)
    """Whole inputs that a node reads beside shares: their gradients are summed over the parts."""
    gathered: set[str] = field(default_factory=set)
    """Values that are also needed whole."""


class Search:
    """Follows shares from the sums behind divided layers.

    Parameters
    ----------
    facts
        Of the part's graph, with an Identity for each collective.
    sums
        Values that are all-reduced behind divided layers and look-ups.
    copies
        Values that only pass a sum of gradients, to divided layers.
    """

    def __init__(self, facts: Facts, sums: Collection[str], copies: Collection[str]) -> None:
        self.facts, self._sums, self._copies = facts, sums, copies
        self.found = Found()

    def run(self) -> Found:
        """Find the changes."""
        facts, findings = self.facts, self.found
        for place, node in enumerate(facts.nodes):
            if node.output and node.output[0] in self._sums:
                self._begin(place, node)
                continue
            input_axes = [findings.axes.get(name) for name in node.input]
            if not any(input_axes) or node.output[0] in self._copies:
                continue
            sliced, copied = dict(findings.sliced), set(findings.copied)
            try:
                output_axes = self._follow(place, node, input_axes)
            except Whole:
                findings.sliced, findings.copied = sliced, copied
                continue
            findings.nodes.add(place)
            findings.axes.update(
                (name, axes) for name, axes in zip(node.output, output_axes, strict=False) if name and axes
            )
        self._drop_useless()
        self._find_whole()
        return findings

    def _begin(self, place: int, node: onnx.NodeProto) -> None:
        value = node.output[0]
        shape = self.facts.shape(value)
        if shape is not None and 2 <= len(shape) <= _MOST_AXES + 1:
            self.found.axes[value] = len(shape) - 1
            self.found.sums.add(place)

    def _follow(self, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
        rule_of = RULES.get((node.domain, node.op_type))
        if rule_of is None or list(walk.subgraphs(node)) or any(not self.pair(name) for name in node.input if name):
            raise Whole
        return rule_of(self, place, node, input_axes)

    def _drop_useless(self) -> None:
        """A sum that no node reads a share of stays whole."""
        findings = self.found
        for place in sorted(findings.sums):
            value = self.facts.nodes[place].output[0]
            if not any(reader in findings.nodes for reader, _ in self.facts.readers.get(value, [])):
                findings.sums.discard(place)
                del findings.axes[value]

    def _find_whole(self) -> None:
        findings, facts = self.found, self.facts
        for value in findings.axes:
            for place, slot in facts.readers.get(value, []):
                copy = facts.nodes[place].output[0] in self._copies
                if slot < 0 or not (place in findings.nodes or copy):
                    findings.gathered.add(value)
            if value in facts.outputs:
                findings.gathered.add(value)

    def pair(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes of a whole value in both trials; None if unknown."""
        return self.facts.pair(value)

    def tokens(self, value: str, axes: int) -> tuple[int, int]:
        """Number of tokens of a whole value in both trials."""
        first, second = self.known(value)
        return _product(first[:axes]), _product(second[:axes])

    def known(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a whole value in both trials. Raises Whole if they are unknown."""
        shapes = self.pair(value)
        if shapes is None:
            raise Whole
        return shapes

    def rank(self, value: str) -> int:
        """Number of axes of a value."""
        return len(self.known(value)[0])

    def beside(self, place: int, slot: int, shape: tuple[tuple[int, ...], tuple[int, ...]], axes: int) -> None:
        """Note how a node that broadcasts to `shape` reads a whole input. Raises Whole."""
        value = self.facts.nodes[place].input[slot]
        gap = len(shape[0]) - self.rank(value)
        trial_sizes = [
            tuple(trial[axis - gap] if axis >= gap else 1 for axis in range(axes)) for trial in self.known(value)
        ]
        if all(size == 1 for trial in trial_sizes for size in trial) and any(
            _product(trial[:axes]) > 1 for trial in shape
        ):
            self.found.copied.add((place, slot))
        elif all(
            size in (1, full_size)
            for trial, full in zip(trial_sizes, shape, strict=True)
            for size, full_size in zip(trial, full[:axes], strict=True)
        ):
            self.found.sliced[place, slot] = axes
        else:
            raise Whole

    def listed(self, node: onnx.NodeProto, slot: int, rank: int) -> list[int] | None:
        """The axes in an input or in the attribute `axes`, counted from 0; None if not given. Raises Whole."""
        name = node.input[slot] if len(node.input) > slot else ""
        if not name:
            axes = attributes_of(node).get("axes")
            return None if axes is None else [int(axis) % rank for axis in axes]
        value = self.facts.constant(name)
        if value is None:
            raise Whole
        return [int(axis) % rank for axis in value.reshape(-1)]


def token_rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for operators."""
    return registered_in(RULES, *operators, domain=domain)


def reshaped_axes(search: Search, node: onnx.NodeProto, axes: int) -> int:
    """Axes of tokens after a Reshape. Raises Whole if it mixes tokens with what a token has."""
    value, output = node.input[0], node.output[0]
    count, new = search.tokens(value, axes), search.known(output)
    for count_of_axes in range(1, _MOST_AXES + 1):
        fits = len(new[0]) >= count_of_axes and search.tokens(output, count_of_axes) == count
        if fits and all(search.facts.size(output, axis) is not None for axis in range(count_of_axes, len(new[0]))):
            return count_of_axes
    raise Whole


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def axis_of(s: Search, node: onnx.NodeProto, default: int = -1) -> int:
    """The axis that a node names, counted from the first."""
    return int(attributes_of(node).get("axis", default)) % s.rank(node.input[0])
