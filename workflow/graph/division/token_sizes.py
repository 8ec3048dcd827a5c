"""How many tokens values have, and how their shares are cut: for `sequence_graph`, which writes the nodes.

Sizes come from inputs of the model where that is possible: each stage of a pipeline can then compute them for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import onnx

from ortflow.workflow.graph.division.rewrite import PartWriter
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.rules.facts import Facts
from ortflow.workflow.graph.rules.sequence import Found

Behind = Sequence[int | None]
"""Sizes of the axes behind the tokens; None for one that varies."""
Sizes = Sequence[int | str | None]
"""Sizes of all axes, as numbers or names."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of some values, and how they are divided.

    `lead`, `count` and `share` are names of int64 vectors in the graph.
    """

    lead: str
    """Sizes of the axes of tokens."""
    count: str
    """Number of tokens."""
    share: str
    """Number of tokens of a share. The last shares are filled with zeros."""
    even: bool
    """Whether the number of tokens is certainly a multiple of the parts."""
    fixed: tuple[int, ...] | None
    """The sizes of `lead` as numbers, with -1 for one at most that varies; None if more do."""
    name: str
    """Of the number of tokens of a share, for shape inference."""

    def of_share(self, axes: int, behind: Behind) -> Sizes:
        """Sizes of a share with `axes` axes of tokens, and those behind them."""
        return [*[1] * (axes - 1), self.name, *behind]


class TokenSizes:
    """Finds the tokens of values.

    Parameters
    ----------
    graph, facts, found
        The graph of a part before it is rewritten, facts about it, and what is computed on shares.
    write
        Appends nodes.
    """

    def __init__(self, graph: onnx.GraphProto, write: PartWriter, facts: Facts, findings: Found) -> None:
        self._inputs, self._write, self._facts, self._found = list(graph.input), write, facts, findings
        self._of_inputs: dict[tuple[str, int], Tokens] = {}
        self._named = 0

    def of(self, value: str, axes: int, listed: Callable[[], str]) -> Tokens:
        """The tokens of a value with `axes` axes of tokens; `listed` writes their sizes if no input has them."""
        source = self._source(value, axes)
        if source is None:
            return self._divided(listed(), axes, None)
        name, token_axes = source
        key = name, axes
        if key not in self._of_inputs:
            write = self._write
            sizes = write("Shape", name, start=0, end=token_axes)
            lead = sizes if axes == token_axes else write("ReduceProd", sizes, keepdims=1)
            fixed_sizes = [self._facts.size(name, axis) for axis in range(token_axes)]
            self._of_inputs[key] = self._divided(lead, axes, fixed_sizes)
        return self._of_inputs[key]

    def reshaped(self, node: onnx.NodeProto, tokens: Tokens) -> str:
        """Write the sizes of the axes of tokens after a Reshape: from its list, or their product."""
        write, output = self._write, node.output[0]
        axes = self._found.axes[output]
        if axes == 1:
            return tokens.count
        values = self._facts.value(node.input[1])
        assert values is not None
        sizes = [write("Slice", node.input[1], write.ints(axis), write.ints(axis + 1)) for axis in range(axes)]
        for axis in range(axes):
            if int(values[axis]) == 0:
                sizes[axis] = write("Slice", tokens.lead, write.ints(axis), write.ints(axis + 1))
        for axis in range(axes):
            if int(values[axis]) == -1:
                sizes[axis] = write("Div", tokens.count, sizes[1 - axis])
        return write("Concat", *sizes, axis=0)

    def behind(self, value: str, axes: int) -> Behind:
        """Sizes of the axes of a value behind its first ones."""
        return [self._facts.size(value, axis) for axis in range(max(axes, 0), len(self._facts.shape(value) or ()))]

    def _divided(self, lead: str, axes: int, fixed_sizes: list[int | None] | None) -> Tokens:
        write = self._write
        even = fixed_sizes is not None and prod(size or 1 for size in fixed_sizes) % write.parts == 0
        count = lead if axes == 1 else write("ReduceProd", lead, keepdims=1)
        rounded_up = count if even else write("Add", count, write.ints(write.parts - 1))
        fixed = None
        if fixed_sizes is not None and fixed_sizes.count(None) <= 1:
            sizes = [-1 if size is None else size for size in fixed_sizes]
            fixed = tuple(sizes) if len(sizes) == axes else (prod(sizes) if -1 not in sizes else -1,)
        self._named += 1
        name = f"ortflow.share.{self._named}"
        return Tokens(lead, count, write("Div", rounded_up, write.ints(write.parts)), even, fixed, name)

    def _source(self, value: str, axes: int) -> tuple[str, int] | None:
        """An input whose first axes are certainly the tokens of a value, and their number; None if none is."""
        facts, shape = self._facts, self._facts.pair(value)
        candidates: dict[tuple[int | str | None, ...], tuple[str, int]] = {}
        for model_input in self._inputs:
            name = model_input.name
            sizes, dims = facts.pair(name), dims_of(model_input)
            if name not in facts.inputs or shape is None or sizes is None or dims is None or len(dims) < 2:
                continue
            equal_sizes = [trial[:2] for trial in sizes] == [trial[:2] for trial in shape]
            product = [trial[0] * trial[1] for trial in sizes] == [trial[0] for trial in shape]
            if (axes == 2 and equal_sizes) or (axes == 1 and product):
                candidates.setdefault(dims[:2], (name, 2))
        return next(iter(candidates.values())) if len(candidates) == 1 else None
