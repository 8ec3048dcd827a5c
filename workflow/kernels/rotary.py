"""Rotary positions, as Llama has them, and their gradient; see rotary.c.

With halves a and b of the last axis, exporters write y = x cos + (-b, a) sin. A Transpose between
[batch, tokens, heads, size] and [batch, heads, tokens, size] on the side of x becomes part of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import MOST_AXES, Dims, Rewriter, is_last_axis, set_of, width_of

_SWAP = [0, 2, 1, 3]


@dataclass(frozen=True)
class _Rotation:
    operator: str
    given: str
    cosine: str
    sine: str
    made: str
    nodes: list[onnx.NodeProto]
    """What computes the result."""


def put(rewriter: Rewriter) -> None:
    """Replace each rotation whose tables are broadcast to the rotated value, and each gradient of one."""
    for add in rewriter.nodes("Add"):
        if rewriter.maker(add.output[0]) is not add:
            continue  # part of a rotation that was replaced before
        rotation = _rotation(rewriter, add) or _gradient(rewriter, add)
        if rotation is not None and _fits(rewriter, rotation):
            _replace(rewriter, rotation)


def _replace(rewriter: Rewriter, rotation: _Rotation) -> None:
    source, target, gone, tokens_first = rotation.given, rotation.made, rotation.nodes, 0
    forward = rotation.operator == "Rotary"
    swap = rewriter.maker(source) if forward else rewriter.only_reader(target)
    swaps = swap is not None and swap.op_type == "Transpose" and attributes_of(swap).get("perm") == _SWAP
    if swap is not None and swaps and (not forward or rewriter.are_read_by(source, gone)):
        source, target = (swap.input[0], target) if forward else (source, swap.output[0])
        gone, tokens_first = [*gone, swap], 1
    rewriter.drop(*gone)
    rewriter.add(rotation.operator, [source, rotation.cosine, rotation.sine], [target], tokens_first=tokens_first)


def _rotation(rewriter: Rewriter, add: onnx.NodeProto) -> _Rotation | None:
    for straight, across in (add.input, reversed(add.input)):
        along, turned = rewriter.made_for(add, straight, "Mul"), rewriter.made_for(add, across, "Mul")
        if along is None or turned is None:
            continue
        for other, sine in (turned.input, reversed(turned.input)):
            joined = rewriter.made_for(turned, other, "Concat")
            if joined is None or len(joined.input) != 2 or not is_last_axis(joined, rewriter.dims(other)):
                continue
            negative = rewriter.made_for(joined, joined.input[0], "Neg")
            if negative is None:
                continue
            b, a = _half(rewriter, negative.input[0], negative), _half(rewriter, joined.input[1], joined)
            if a is None or b is None or (a.of, a.number, b.number) != (b.of, 0, 1) or a.of not in along.input:
                continue
            cosine = along.input[1 - list(along.input).index(a.of)]
            nodes = set_of([add, along, turned, joined, negative, a.node, b.node])
            return _Rotation("Rotary", a.of, cosine, sine, add.output[0], nodes)
    return None


def _gradient(rewriter: Rewriter, add: onnx.NodeProto) -> _Rotation | None:
    """The sum of dy cos, b's part of dy sin at the place of a, and minus a's part at that of b."""
    terms = _padded(rewriter, add) or _joined(rewriter, add)
    if terms is None:
        return None
    along, upper, lower, remaining = terms
    negative = rewriter.made_for(lower.reader, lower.value, "Neg")
    if negative is None:
        return None
    a, b = _half(rewriter, negative.input[0], negative), _half(rewriter, upper.value, upper.reader)
    if a is None or b is None or (a.of, a.number, b.number) != (b.of, 0, 1):
        return None
    halves = set_of([a.node, b.node])
    turned = rewriter.maker(a.of)
    if turned is None or turned.op_type != "Mul" or not rewriter.are_read_by(a.of, halves):
        return None
    dy = next((value for value in turned.input if value in along.input), None)
    if dy is None:
        return None
    cosine, sine = (node.input[1 - list(node.input).index(dy)] for node in (along, turned))
    return _Rotation("RotaryGrad", dy, cosine, sine, add.output[0], set_of([*remaining, negative, *halves, turned]))


class _Read(NamedTuple):
    value: str
    reader: onnx.NodeProto


_Parts = tuple[onnx.NodeProto, _Read, _Read, list[onnx.NodeProto]]
"""dy cos, what is at the place of a and of b, and the nodes that put all of it together."""


def _joined(rewriter: Rewriter, add: onnx.NodeProto) -> _Parts | None:
    """The gradient of halves that a Split made: they are concatenated."""
    for straight, across in (add.input, reversed(add.input)):
        along, joined = rewriter.made_for(add, straight, "Mul"), rewriter.made_for(add, across, "Concat")
        if along is None or joined is None or len(joined.input) != 2:
            continue
        if is_last_axis(joined, rewriter.dims(across)):
            return along, _Read(joined.input[0], joined), _Read(joined.input[1], joined), [add, along, joined]
    return None


def _padded(rewriter: Rewriter, add: onnx.NodeProto) -> _Parts | None:
    """The gradient of halves that Slices made: each is padded with zeros. The three terms are added in any order."""
    adds, terms = [add], list[tuple[str, onnx.NodeProto]]()
    for value in add.input:
        inner = rewriter.made_for(add, value, "Add")
        if inner is not None and len(adds) == 1:
            adds.append(inner)
            terms += [(term, inner) for term in inner.input]
        else:
            terms.append((value, add))
    if len(terms) != 3:
        return None
    along, pads = None, dict[int, onnx.NodeProto]()
    for value, reader in terms:
        along = rewriter.made_for(reader, value, "Mul") or along
        pad = rewriter.made_for(reader, value, "Pad")
        if pad is not None and (place := _place(rewriter, pad)) is not None:
            pads[place] = pad
    if along is None or len(pads) != 2:
        return None
    upper, lower = (_Read(pads[place].input[0], pads[place]) for place in (0, 1))
    return along, upper, lower, [*adds, along, *pads.values()]


@dataclass(frozen=True)
class _Half:
    of: str
    number: int
    node: onnx.NodeProto


def _half(rewriter: Rewriter, value: str, reader: onnx.NodeProto) -> _Half | None:
    """The value whose first (0) or second (1) half of the last axis a value is, which only `reader` reads."""
    node = rewriter.maker(value)
    if node is None or node.op_type not in ("Slice", "Split") or rewriter.only_reader(value) is not reader:
        return None
    dims = rewriter.dims(node.input[0])
    width = width_of(dims)
    if dims is None or width is None or width % 2 or width_of(rewriter.dims(value)) != width // 2:
        return None
    if node.op_type == "Split":
        fits = len(node.output) == 2 and is_last_axis(node, dims)
        return _Half(node.input[0], list(node.output).index(value), node) if fits else None
    starts, axes, steps = (
        rewriter.integers(node.input[place]) if len(node.input) > place and node.input[place] else None
        for place in (1, 3, 4)
    )
    if starts is None or len(starts) != 1 or axes not in ([-1], [len(dims) - 1]) or steps not in (None, [1]):
        return None
    start = starts[0] + width if starts[0] < 0 else starts[0]
    # Of the known length, it ends where the half does.
    return _Half(node.input[0], start * 2 // width, node) if start in (0, width // 2) else None


def _place(rewriter: Rewriter, pad: onnx.NodeProto) -> int | None:
    """Which half of the last axis of the result a Pad of zeros fills."""
    dims, pads = rewriter.dims(pad.input[0]), rewriter.integers(pad.input[1])
    optional = [value for value in pad.input[2:] if value]
    if dims is None or pads is None or attributes_of(pad).get("mode", b"constant") not in (b"constant", "constant"):
        return None
    if optional and (
        len(optional) > 1 or pad.input[2] != optional[0] or rewriter.number(optional[0], pad.input[0]) != 0
    ):
        return None
    rank, half = len(dims), width_of(dims)
    begins, ends = pads[:rank], pads[rank:]
    if half is None or len(ends) != rank or any(begins[:-1]) or any(ends[:-1]):
        return None
    return {(0, half): 0, (half, 0): 1}.get((begins[-1], ends[-1]))


def _fits(rewriter: Rewriter, rotation: _Rotation) -> bool:
    """Whether all values are fp32, and the tables have one shape, which does not broadcast the rotated value."""
    dims, table = rewriter.dims(rotation.given), _table(rewriter, rotation.cosine)
    if not rewriter.fits(rotation.given) or dims is None or table is None or _table(rewriter, rotation.sine) != table:
        return False
    width = width_of(dims)
    return (
        len(table) <= len(dims)
        and width is not None
        and table[-1] == width
        and all(
            size == 1 or (size is not None and size == size_of_all)
            for size, size_of_all in zip(table, dims[len(dims) - len(table) :], strict=True)
        )
    )


def _table(rewriter: Rewriter, value: str) -> Dims | None:
    """Shape of an fp32 table that the graph computes or contains; None for anything else."""
    tensor = next((initializer for initializer in rewriter.graph.initializer if initializer.name == value), None)
    if tensor is not None:
        return (
            tuple(tensor.dims) if tensor.data_type == TensorProto.FLOAT and 1 <= len(tensor.dims) <= MOST_AXES else None
        )
    return rewriter.dims(value) if rewriter.fits(value) else None
