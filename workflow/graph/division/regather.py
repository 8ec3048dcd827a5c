"""Gathers shares of the tokens again in the backward pass, so that the whole of them need not be kept until then.

The gradient of a divided layer's weight needs the layer's input, which is whole, while every part keeps a share of it
(Korthikanti et al. 2022). Called by `assembly` on the training graph when its nodes have their final order.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.edit import Editor, described, replace
from ortflow.workflow.graph.ir.order import needed_by, prune

_VIEWS = frozenset(["Cast", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"])
"""Operators between what is gathered and what computes with it."""
_SHAPES = frozenset(["Shape", "Size"])


def gather_again(graph: onnx.GraphProto) -> int:
    """Let the backward pass read gathers of its own, in place; returns their number. Nodes must be sorted."""
    nodes = list(graph.node)
    forward = needed_by(nodes, (value.name for value in graph.output if not value.name.endswith("_grad")))
    makers: dict[str, int] = {}
    """Value that only gathers and moves a share -> its node."""
    origin: dict[str, int] = {}
    """The same -> the gather that it is from."""
    for place, node in enumerate(nodes):
        gathers = place in forward and is_collective(node) and kind_of(node) == Kind.ALL_GATHER
        if gathers or (node.op_type in _VIEWS and node.domain == "" and node.input[0] in origin):
            makers[node.output[0]] = place
            origin[node.output[0]] = place if gathers else origin[node.input[0]]
    moving = set(makers.values())
    readers: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        # Nodes that only read the shape run as soon as the first pass has it.
        if place in forward or place in moving or node.op_type in _SHAPES or list(walk.subgraphs(node)):
            continue
        for gather in sorted({origin[name] for name in node.input if name in origin}):
            readers.setdefault(gather, []).append(place)
    edit, before = Editor(graph), dict[int, list[onnx.NodeProto]]()
    descriptions = described(graph)
    for gather, places in readers.items():
        renamed: dict[str, str] = {}
        copies: list[onnx.NodeProto] = []
        for place in places:
            for slot, name in enumerate(nodes[place].input):
                if origin.get(name) == gather:
                    nodes[place].input[slot] = _again(name, nodes, makers, renamed, copies, edit)
        before.setdefault(places[0], []).extend(copies)
        for name, new in renamed.items():
            if name in descriptions:
                copy = onnx.ValueInfoProto.FromString(descriptions[name].SerializeToString())
                copy.name = new
                graph.value_info.append(copy)
    ordered = [entry for place, node in enumerate(nodes) for entry in (*before.get(place, ()), node)]
    replace(graph.node, ordered)
    prune(graph)
    return len(readers)


def _again(
    name: str,
    nodes: list[onnx.NodeProto],
    makers: dict[str, int],
    renamed: dict[str, str],
    copies: list[onnx.NodeProto],
    edit: Editor,
) -> str:
    """The name of a value's copy, whose nodes are added to `copies`."""
    if name not in renamed:
        node = onnx.NodeProto()
        node.CopyFrom(nodes[makers[name]])
        if node.input[0] in makers:
            node.input[0] = _again(node.input[0], nodes, makers, renamed, copies, edit)
        renamed[name] = node.output[0] = edit.fresh(f"{name}.again")
        node.name = f"{renamed[name]}/{node.op_type}"
        copies.append(node)
    return renamed[name]
