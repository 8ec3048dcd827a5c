"""Writes the graph of a part whose norms, dropout and additions are computed on a share of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division import sequence_rules  # noqa: F401 - enters the rules
from ortflow.workflow.graph.division.facts import Facts
from ortflow.workflow.graph.division.rewrite import PartWriter
from ortflow.workflow.graph.division.sequence import Found, Search
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.edit import attributes_of, dims_of, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit

_LAST = 2**31
_CARRIED = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE)
"""Types that collectives exchange."""


def share_tokens(
    model: onnx.ModelProto,
    tensors: Mapping[str, Sequence[int]],
    trained: Collection[str],
    loss: str,
    sums: Collection[str],
    part: int,
    parts: int,
    channel: int,
) -> list[str]:
    """Compute on a share of the tokens what lies between divided layers, in place; returns log lines.

    Parameters
    ----------
    model
        The forward graph of a part, not yet differentiated.
    tensors
        Shapes of the part's tensors.
    trained, loss
        As in `divide`.
    sums
        Values that are all-reduced behind divided layers and look-ups.
    part, parts, channel
        As in `divide`.

    Raises
    ------
    UserError
        If there is nothing to compute on a share.
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    copies = set()
    for node in plain.graph.node:
        if is_collective(node):
            if kind_of(node) == Kind.COPY:
                copies.add(node.output[0])
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    facts = Facts(plain, tensors, trained, loss)
    found = Search(facts, sums, copies).run()
    if not found.nodes:
        raise UserError(
            "is true, and nothing between divided layers can be computed on a share of the tokens",
            where="parallel.sequence_parallel",
            fix="set it to false",
        )
    _Writing(model, facts, found, copies, part, parts, channel).run()
    sort_nodes(model.graph)
    prune(model.graph)
    shapes.infer(model)
    sums = f"{len(found.sums)} sums scattered over the tokens"
    return [f"{sums}: {len(found.nodes)} nodes between divided layers computed on 1/{parts} of them each"]


@dataclass(frozen=True)
class _Tokens:
    """The tokens of some values, and how they are divided; names of int64 vectors in the graph."""

    lead: str
    """Sizes of the axes of tokens."""
    count: str
    """Number of tokens."""
    share: str
    """Number of tokens of a share. The last shares are filled with zeros."""
    even: bool
    """Whether the number of tokens is certainly a multiple of the parts."""


class _Writing:
    def __init__(
        self, model: onnx.ModelProto, facts: Facts, found: Found, copies: Collection[str], part: int, parts: int,
        channel: int,
    ) -> None:  # fmt: skip
        self._model, self._facts, self._found, self._copies = model, facts, found, copies
        self._nodes = list(model.graph.node)
        self._write = PartWriter(model.graph, part, parts, channel)
        self._tokens: dict[str, _Tokens] = {}
        self._leads: dict[tuple[str, int], _Tokens] = {}
        self._copied: dict[str, str] = {}
        self._sliced: dict[tuple[str, str, int], str] = {}
        self._types = shapes.value_types(model)

    def run(self) -> None:
        graph, write = self._model.graph, self._write
        for place, old in enumerate(self._nodes):
            node = onnx.NodeProto()
            node.CopyFrom(old)
            before = len(write.made)
            self._node(place, node)
            for name in old.output:
                if name in self._found.gathered:
                    self._gather(name, output=name, copied=False)
            inherit([each for each in write.made[before:] if each is not node], old)
        replace(graph.node, write.made)
        stale = self._found.axes.keys() | {name for node in write.made for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name not in stale])

    def _name(self, value: str) -> str:
        """The name of a value's share: its own, unless the whole needs that."""
        return f"{value}.share" if value in self._found.gathered else value

    def _node(self, place: int, node: onnx.NodeProto) -> None:
        found, write = self._found, self._write
        if place in found.sums:
            self._scatter(node)
        elif node.output and node.output[0] in self._copies and node.input[0] in found.axes:
            self._gather(node.input[0], output=node.output[0], copied=True)
        elif place in found.nodes:
            self._on_share(place, node)
        else:
            write.keep(node)

    def _scatter(self, node: onnx.NodeProto) -> None:
        """The sum of the parts' values, of which each gets its share."""
        write, value, output = self._write, node.input[0], node.output[0]
        axes = self._found.axes[output]
        tokens = self._tokens_of(output, axes, lambda: write("Shape", value, start=0, end=axes))
        flat = self._flat(value, axes)
        name = self._name(output)
        if axes == 1:
            write.reduce(self._padded(flat, tokens), Kind.REDUCE_SCATTER, name)
        else:
            rows = write.reduce(self._padded(flat, tokens), Kind.REDUCE_SCATTER)
            write("Unsqueeze", rows, write.ints(0), output=name)
        self._tokens[output] = tokens

    def _gather(self, value: str, *, output: str, copied: bool) -> None:
        """The whole of a value. With `copied`, each part has a term of its gradient, else all have the same."""
        write, tokens, axes = self._write, self._tokens[value], self._found.axes[value]
        kind = shapes.element_type(self._types, value)
        share, rank = self._name(value), len(self._facts.shape(value) or ())
        if axes == 2:
            share = write("Squeeze", share, write.ints(0))
        if kind not in _CARRIED:
            share = write.cast(share)
        trained = value in self._facts.trained
        if copied or not trained:
            whole = write.reduce(share, Kind.ALL_GATHER)
        else:
            zeros = write.ints(*[0] * (rank - axes))
            before = write("Mul", tokens.share, write.ints(write.part))
            behind = write("Mul", tokens.share, write.ints(write.parts - 1 - write.part))
            whole = write.reduce(write("Pad", share, write("Concat", before, zeros, behind, zeros, axis=0)))
        if not tokens.even:
            whole = write("Slice", whole, write.ints(0), tokens.count, write.ints(0))
        if kind not in _CARRIED:
            whole = write.cast(whole, kind)
        if axes == 1:
            write("Identity", whole, output=output)
        else:
            rest = write("Shape", whole, start=1)
            write("Reshape", whole, write("Concat", tokens.lead, rest, axis=0), output=output)

    def _on_share(self, place: int, node: onnx.NodeProto) -> None:
        found, write, facts = self._found, self._write, self._facts
        first = next(name for name in node.input if name in found.axes)
        tokens, axes = self._tokens[first], found.axes[first]
        for slot, name in enumerate(list(node.input)):
            if name in found.axes:
                node.input[slot] = self._name(name)
            elif (place, slot) in found.copied:
                node.input[slot] = self._copy(name)
            elif (place, slot) in found.sliced:
                node.input[slot] = self._slice(name, facts.nodes[place].output[0], axes, tokens)
        outputs = list(node.output)
        if node.op_type == "Shape":
            flags = attributes_of(node)
            rest = write("Shape", node.input[0], start=axes)
            sizes = write("Concat", tokens.lead, rest, axis=0)
            ends = write.ints(flags.get("start", 0)), write.ints(flags.get("end", _LAST))
            write("Slice", sizes, *ends, output=outputs[0])
            return
        node.output[:] = [self._name(name) if name in found.axes else name for name in outputs]
        if node.op_type == "Reshape":
            made = found.axes[outputs[0]]
            sizes_left = [facts.size(outputs[0], axis) or 0 for axis in range(made, len(facts.shape(outputs[0]) or ()))]
            if made != axes or (made == 2 and facts.pair(outputs[0]) != facts.pair(first)):
                tokens = self._tokens_of(outputs[0], made, lambda: self._listed(facts.nodes[place], tokens))
            node.input[1] = write.ints(*[1] * (made - 1), -1, *sizes_left)
            del node.attribute[:]
            write.keep(node)
        elif node.op_type == "Dropout":
            self._dropout(node, axes, tokens)
        else:
            write.keep(node)
        self._tokens.update((name, tokens) for name in outputs if name in found.axes)

    def _dropout(self, node: onnx.NodeProto, axes: int, tokens: _Tokens) -> None:
        """The part's share of the mask that the undivided graph draws."""
        write = self._write
        value, output, mask = node.input[0], node.output[0], node.output[1] if len(node.output) > 1 else ""
        sizes = write("Concat", tokens.lead, write("Shape", value, start=axes), axis=0)
        node.input[0] = write("ConstantOfShape", sizes, value=numpy_helper.from_array(np.ones(1, np.float32)))
        node.output[0] = write.fresh("kept")
        if mask:
            node.output[1] = write.fresh("mask")
        write.keep(node)
        if mask:
            self._part_of(node.output[1], axes, tokens, mask)
        write("Mul", value, self._part_of(node.output[0], axes, tokens), output=output)

    def _copy(self, name: str) -> str:
        """A whole value, with its gradient summed over the parts."""
        if name not in self._facts.trained:
            return name
        if name not in self._copied:
            self._copied[name] = self._write.reduce(name, Kind.COPY)
        return self._copied[name]

    def _slice(self, name: str, output: str, axes: int, tokens: _Tokens) -> str:
        """The share of a whole value that a node reads which broadcasts to the shape of `output`."""
        facts, write = self._facts, self._write
        rank = len(facts.shape(output) or ())
        key = name, tokens.lead, rank
        if key not in self._sliced:
            whole, shape, full = self._copy(name), facts.pair(name), facts.pair(output)
            complete = shape and full and len(shape[0]) == rank and _leads(shape, axes) == _leads(full, axes)
            if not complete:
                ones = [write.ints(*[1] * (rank - axes))] if rank > axes else []
                whole = write("Expand", whole, write("Concat", tokens.lead, *ones, axis=0))
            self._sliced[key] = self._part_of(whole, axes, tokens)
        return self._sliced[key]

    def _part_of(self, whole: str, axes: int, tokens: _Tokens, output: str | None = None) -> str:
        """This part's share of a value with all tokens."""
        write = self._write
        rows = self._padded(self._flat(whole, axes), tokens)
        start = write("Mul", tokens.share, write.ints(write.part))
        ends = start, write("Add", start, tokens.share), write.ints(0)
        if axes == 1:
            return write("Slice", rows, *ends, output=output)
        return write("Unsqueeze", write("Slice", rows, *ends), write.ints(0), output=output)

    def _flat(self, value: str, axes: int) -> str:
        """A value with one axis of tokens."""
        if axes == 1:
            return value
        write = self._write
        return write("Reshape", value, write("Concat", write.ints(-1), write("Shape", value, start=axes), axis=0))

    def _padded(self, rows: str, tokens: _Tokens) -> str:
        """As many rows as all shares together."""
        if tokens.even:
            return rows
        write = self._write
        missing = write("Sub", write("Mul", tokens.share, write.ints(write.parts)), tokens.count)
        pads = write("Concat", write.ints(0), missing, axis=0)
        return write("Pad", rows, pads, "", write.ints(0))

    def _tokens_of(self, value: str, axes: int, listed: Callable[[], str]) -> _Tokens:
        """The tokens of a value. Their sizes come from an input of the model if possible, else from `listed`.

        Each stage of a pipeline can compute sizes of inputs for itself.
        """
        write = self._write
        source = self._source(value, axes)
        if source is None:
            lead = listed()
            return self._divided(lead, axes, even=False)
        name, taken = source
        key = name, axes
        if key not in self._leads:
            sizes = write("Shape", name, start=0, end=taken)
            lead = sizes if axes == taken else write("ReduceProd", sizes, keepdims=1)
            known = [self._facts.size(name, axis) or 1 for axis in range(taken)]
            self._leads[key] = self._divided(lead, axes, even=int(np.prod(known)) % write.parts == 0)
        return self._leads[key]

    def _divided(self, lead: str, axes: int, *, even: bool) -> _Tokens:
        write = self._write
        count = lead if axes == 1 else write("ReduceProd", lead, keepdims=1)
        whole = count if even else write("Add", count, write.ints(write.parts - 1))
        return _Tokens(lead, count, write("Div", whole, write.ints(write.parts)), even)

    def _source(self, value: str, axes: int) -> tuple[str, int] | None:
        """An input whose first axes are certainly the tokens of a value, and their number; None if none is."""
        facts, shape = self._facts, self._facts.pair(value)
        candidates: dict[tuple[int | str | None, ...], tuple[str, int]] = {}
        for each in self._model.graph.input:
            name = each.name
            sizes, dims = facts.pair(name), dims_of(each)
            if name not in facts.inputs or shape is None or sizes is None or dims is None or len(dims) < 2:
                continue
            same = [trial[:2] for trial in sizes] == [trial[:2] for trial in shape]
            product = [trial[0] * trial[1] for trial in sizes] == [trial[0] for trial in shape]
            if (axes == 2 and same) or (axes == 1 and product):
                candidates.setdefault(dims[:2], (name, 2))
        return next(iter(candidates.values())) if len(candidates) == 1 else None

    def _listed(self, node: onnx.NodeProto, tokens: _Tokens) -> str:
        """The sizes of the axes of tokens after a Reshape: from its list, or their product."""
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


def _leads(shape: tuple[tuple[int, ...], tuple[int, ...]], axes: int) -> list[tuple[int, ...]]:
    """The first sizes in both trials."""
    return [trial[:axes] for trial in shape]
