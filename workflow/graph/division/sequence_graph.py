"""Writes the graph of a part whose norms, dropout and additions are computed on a share of the tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.rewrite import PartWriter
from ortflow.workflow.graph.division.token_sizes import Behind, Sizes, Tokens, TokenSizes
from ortflow.workflow.graph.division.trials import facts_of
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.edit import attributes_of, dims_of, replace
from ortflow.workflow.graph.ir.named_sizes import name_sizes
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.operators import families  # noqa: F401 - enters the rules
from ortflow.workflow.graph.rules.facts import Facts
from ortflow.workflow.graph.rules.sequence import Found, Search

# An end behind the last element is clamped: ONNX's way to say "to the end".
_LAST = 2**31
_UNKNOWN = "unk__"
"""Begin of the names that onnx gives to sizes that it does not find."""
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
    lengths: Mapping[str, int] | None = None,
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
    lengths
        Input of the model -> size of its second axis in all samples, where it is dynamic and known.

    Raises
    ------
    UserError
        If there is nothing to compute on a share.
    """
    _fix(model.graph, lengths or {})
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    copies = set()
    for node in plain.graph.node:
        if is_collective(node):
            if kind_of(node) == Kind.COPY:
                copies.add(node.output[0])
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    facts = facts_of(plain, tensors, trained, loss)
    findings = Search(facts, sums, copies).run()
    if not findings.nodes:
        raise UserError(
            "is true, and nothing between divided layers can be computed on a share of the tokens",
            where="parallel.sequence_parallel",
            fix="set it to false",
        )
    _Writing(model, facts, findings, copies, part, parts, channel).run()
    sort_nodes(model.graph)
    prune(model.graph)
    shapes.infer(model)
    sums = f"{len(findings.sums)} sums scattered over the tokens"
    return [f"{sums}: {len(findings.nodes)} nodes between divided layers computed on 1/{parts} of them each"]


def _fix(graph: onnx.GraphProto, lengths: Mapping[str, int]) -> None:
    """Give inputs the length that all samples have, in place."""
    for value in graph.input:
        dims = dims_of(value) or ()
        if value.name in lengths and len(dims) > 1 and not isinstance(dims[1], int):
            value.type.tensor_type.shape.dim[1].dim_value = lengths[value.name]
            # Other values have the name of the axis, which stands for this number.
            del graph.value_info[:]


class _Writing:
    def __init__(
        self, model: onnx.ModelProto, facts: Facts, findings: Found, copies: Collection[str], part: int, parts: int,
        channel: int,
    ) -> None:  # fmt: skip
        self._model, self._facts, self._found, self._copies = model, facts, findings, copies
        self._nodes = list(model.graph.node)
        self._write = PartWriter(model.graph, part, parts, channel)
        self._sizes = TokenSizes(model.graph, self._write, facts, findings)
        self._tokens: dict[str, Tokens] = {}
        self._made: dict[str, Sizes] = {}
        """Share, or whole of a share, that a node makes -> its sizes."""
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
            inherit([node_added for node_added in write.made[before:] if node_added is not node], old)
        for value, tokens in self._tokens.items():
            axes = self._found.axes[value]
            self._made[self._name(value)] = tokens.of_share(axes, self._sizes.behind(value, axes))
        for node in write.made:
            sizes = next(filter(None, map(self._made.get, node.output)), None)
            if sizes is not None:
                # Shape inference does not find them.
                name_sizes(node, sizes)
        replace(graph.node, write.made)
        stale = self._found.axes.keys() | {name for node in write.made for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name not in stale])

    def _name(self, value: str) -> str:
        """The name of a value's share: its own, unless the whole needs that."""
        return f"{value}.share" if value in self._found.gathered else value

    def _node(self, place: int, node: onnx.NodeProto) -> None:
        findings, write = self._found, self._write
        if place in findings.sums:
            self._scatter(node)
        elif node.output and node.output[0] in self._copies and node.input[0] in findings.axes:
            self._gather(node.input[0], output=node.output[0], copied=True)
        elif place in findings.nodes:
            self._on_share(place, node)
        else:
            write.keep(node)

    def _scatter(self, node: onnx.NodeProto) -> None:
        """The sum of the parts' values, of which each gets its share."""
        write, value, output = self._write, node.input[0], node.output[0]
        axes = self._found.axes[output]
        tokens = self._sizes.of(output, axes, lambda: write("Shape", value, start=0, end=axes))
        flat = self._flat(value, self._sizes.behind(output, axes), axes)
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
            gathered = write.reduce(share, Kind.ALL_GATHER)
        else:
            zeros = write.ints(*[0] * (rank - axes))
            before = write("Mul", tokens.share, write.ints(write.part))
            after = write("Mul", tokens.share, write.ints(write.parts - 1 - write.part))
            gathered = write.reduce(write("Pad", share, write("Concat", before, zeros, after, zeros, axis=0)))
        if not tokens.even:
            gathered = write("Slice", gathered, write.ints(0), tokens.count, write.ints(0))
        if kind not in _CARRIED:
            gathered = write.cast(gathered, kind)
        behind = self._sizes.behind(value, axes)
        fixed_sizes = [size for size in behind if size is not None]
        names = shapes.named_shape(self._types, value) or []
        self._made[output] = [None if str(name).startswith(_UNKNOWN) else name for name in names]
        if axes == 1:
            write("Identity", gathered, output=output)
        elif tokens.fixed is not None and len(fixed_sizes) == len(behind):
            write("Reshape", gathered, write.ints(*tokens.fixed, *fixed_sizes), output=output)
        else:
            sizes = write("Concat", tokens.lead, write("Shape", gathered, start=1), axis=0)
            write("Reshape", gathered, sizes, output=output)

    def _on_share(self, place: int, node: onnx.NodeProto) -> None:
        findings, write, facts = self._found, self._write, self._facts
        first = next(name for name in node.input if name in findings.axes)
        tokens, axes = self._tokens[first], findings.axes[first]
        for slot, name in enumerate(list(node.input)):
            if name in findings.axes:
                node.input[slot] = self._name(name)
            elif (place, slot) in findings.copied:
                node.input[slot] = self._copy(name)
            elif (place, slot) in findings.sliced:
                node.input[slot] = self._slice(name, facts.nodes[place].output[0], axes, tokens)
        outputs = list(node.output)
        if node.op_type == "Shape":
            flags = attributes_of(node)
            rest = write("Shape", node.input[0], start=axes)
            sizes = write("Concat", tokens.lead, rest, axis=0)
            ends = write.ints(flags.get("start", 0)), write.ints(flags.get("end", _LAST))
            write("Slice", sizes, *ends, output=outputs[0])
            return
        node.output[:] = [self._name(name) if name in findings.axes else name for name in outputs]
        if node.op_type == "Reshape":
            output_axes = findings.axes[outputs[0]]
            sizes_left = [
                facts.size(outputs[0], axis) or 0 for axis in range(output_axes, len(facts.shape(outputs[0]) or ()))
            ]
            if output_axes != axes or (output_axes == 2 and facts.pair(outputs[0]) != facts.pair(first)):
                tokens = self._sizes.of(
                    outputs[0], output_axes, lambda: self._sizes.reshaped(facts.nodes[place], tokens)
                )
            node.input[1] = write.ints(*[1] * (output_axes - 1), -1, *sizes_left)
            del node.attribute[:]
            write.keep(node)
        elif node.op_type == "Dropout":
            self._dropout(node, outputs[0], axes, tokens)
        else:
            write.keep(node)
        self._tokens.update((name, tokens) for name in outputs if name in findings.axes)

    def _dropout(self, node: onnx.NodeProto, value_name: str, axes: int, tokens: Tokens) -> None:
        """The part's share of the mask that the undivided graph draws for the value `value_name`."""
        write = self._write
        value, output, mask = node.input[0], node.output[0], node.output[1] if len(node.output) > 1 else ""
        behind = self._sizes.behind(value_name, axes)
        sizes = write("Concat", tokens.lead, write("Shape", value, start=axes), axis=0)
        node.input[0] = write("ConstantOfShape", sizes, value=numpy_helper.from_array(np.ones(1, np.float32)))
        node.output[0] = write.fresh("kept")
        if mask:
            node.output[1] = write.fresh("mask")
        write.keep(node)
        if mask:
            self._part_of(node.output[1], behind, axes, tokens, mask)
        write("Mul", value, self._part_of(node.output[0], behind, axes, tokens), output=output)

    def _copy(self, name: str) -> str:
        """A whole value, with its gradient summed over the parts."""
        if name not in self._facts.trained:
            return name
        if name not in self._copied:
            self._copied[name] = self._write.reduce(name, Kind.COPY)
        return self._copied[name]

    def _slice(self, name: str, output: str, axes: int, tokens: Tokens) -> str:
        """The share of a whole value that a node reads which broadcasts to the shape of `output`."""
        facts, write = self._facts, self._write
        rank = len(facts.shape(output) or ())
        key = name, tokens.lead, rank
        if key not in self._sliced:
            full_value, shape, full = self._copy(name), facts.pair(name), facts.pair(output)
            complete = shape and full and len(shape[0]) == rank and _leads(shape, axes) == _leads(full, axes)
            if not complete:
                ones = [write.ints(*[1] * (rank - axes))] if rank > axes else []
                full_value = write("Expand", full_value, write("Concat", tokens.lead, *ones, axis=0))
            own_sizes = self._sizes.behind(name, len(facts.shape(name) or ()) - (rank - axes))
            behind = [*[1] * (rank - axes - len(own_sizes)), *own_sizes]
            self._sliced[key] = self._part_of(full_value, behind, axes, tokens)
            self._made[self._sliced[key]] = tokens.of_share(axes, behind)
        return self._sliced[key]

    def _part_of(self, full_value: str, behind: Behind, axes: int, tokens: Tokens, output: str | None = None) -> str:
        """This part's share of a value with all tokens; `behind` are the sizes of its other axes."""
        write = self._write
        if tokens.even and (axes == 2 or None not in behind):
            # By constants alone: a CUDA graph cannot contain what copies computed sizes.
            sizes = [0 if axes == 2 else size or 0 for size in behind]
            shares = write("Reshape", full_value, write.ints(write.parts, -1, *sizes))
            ends = write.ints(write.part), write.ints(write.part + 1), write.ints(0)
            if axes == 2:
                return write("Slice", shares, *ends, output=output)
            return write("Squeeze", write("Slice", shares, *ends), write.ints(0), output=output)
        rows = self._padded(self._flat(full_value, behind, axes), tokens)
        start = write("Mul", tokens.share, write.ints(write.part))
        ends = start, write("Add", start, tokens.share), write.ints(0)
        if axes == 1:
            return write("Slice", rows, *ends, output=output)
        return write("Unsqueeze", write("Slice", rows, *ends), write.ints(0), output=output)

    def _flat(self, value: str, behind: Behind, axes: int) -> str:
        """A value with one axis of tokens; `behind` are the sizes of its other axes."""
        if axes == 1:
            return value
        write, fixed_sizes = self._write, [size for size in behind if size is not None]
        if len(fixed_sizes) == len(behind):
            return write("Reshape", value, write.ints(-1, *fixed_sizes))
        return write("Reshape", value, write("Concat", write.ints(-1), write("Shape", value, start=axes), axis=0))

    def _padded(self, rows: str, tokens: Tokens) -> str:
        """As many rows as all shares together."""
        if tokens.even:
            return rows
        write = self._write
        missing = write("Sub", write("Mul", tokens.share, write.ints(write.parts)), tokens.count)
        pads = write("Concat", write.ints(0), missing, axis=0)
        return write("Pad", rows, pads, "", write.ints(0))


def _leads(shape: tuple[tuple[int, ...], tuple[int, ...]], axes: int) -> list[tuple[int, ...]]:
    """The first sizes in both trials."""
    return [trial[:axes] for trial in shape]
