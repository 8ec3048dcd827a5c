"""Queries, keys and values that timm and torchvision take from one projection as parts of a transposed value.

Called by `ortflow.torch.gpu_graphs` before attention is recognised. `qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4)`
is divided along its first axis: three copies, whose gradients are padded to the whole and added. The projection is
divided instead, as in a GPT, so that attention reads its parts where they are. Results are bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, constants_of, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes

_PERMUTATION = [2, 0, 3, 1, 4]
_PARTS = 3


@dataclass(frozen=True)
class _Packed:
    flat: str
    """The projection, [batch, tokens, 3 * heads * size]."""
    heads: int
    size: int
    parts: tuple[onnx.NodeProto, ...]
    """The nodes whose outputs are queries, keys and values, [batch, heads, tokens, size]."""


def unpack_heads(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose queries, keys and values are parts of the projection itself."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    packed = _found(copy)
    if not packed:
        return copy
    edit = Editor(graph)
    for projection in packed:
        width = projection.heads * projection.size
        names = [f"{part.output[0]}/flat" for part in projection.parts]
        edit.write("Split", [projection.flat, edit.ints(*[width] * _PARTS)], names, axis=2)
        for name, part in zip(names, projection.parts, strict=True):
            heads = edit(
                "Reshape", name, edit.ints(0, 0, projection.heads, projection.size), output=f"{part.output[0]}/heads"
            )
            edit("Transpose", heads, output=part.output[0], perm=[0, 2, 1, 3])
    dropped = {part.output[0] for projection in packed for part in projection.parts}
    last = len(graph.node) - sum(1 + 2 * _PARTS for _ in packed)
    replace(graph.node, [n for place, n in enumerate(graph.node) if place >= last or n.output[0] not in dropped])
    sort_nodes(graph)
    prune(graph)
    return copy


def _found(model: onnx.ModelProto) -> list[_Packed]:
    graph = model.graph
    types, constants = shapes.value_types(model), constants_of(graph)
    producers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in walk.inputs(node):
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    projections = []
    for node in graph.node:
        if node.op_type != "Transpose" or node.domain or attributes_of(node).get("perm") != _PERMUTATION:
            continue
        reshape = producers.get(node.input[0])
        dims = shapes.shape(types, node.input[0])
        if (
            reshape is None
            or reshape.op_type != "Reshape"
            or not dims
            or dims[2] != _PARTS
            or not dims[3]
            or not dims[4]
        ):
            continue
        before, after_reshape = (shapes.named_shape(types, name) for name in (reshape.input[0], node.input[0]))
        if before is None or after_reshape is None or len(before) != 3 or before[2] != _PARTS * dims[3] * dims[4]:
            continue
        # If batch or tokens stay, the other ones do, too. Frames or windows may become samples here.
        if not any(size is not None and size == after_reshape[axis] for axis, size in enumerate(before[:2])):
            continue
        parts: dict[int, onnx.NodeProto] = {}
        inner = readers.get(node.output[0], [])
        for gather in inner:
            place = _place(gather, constants)
            after = readers.get(gather.output[0], [])
            if place is not None and len(after) == 1 and _is_squeeze(after[0], constants):
                parts[place] = after[0]
        complete = len(inner) == _PARTS and sorted(parts) == [*range(_PARTS)]
        if complete and not outputs.intersection([node.output[0], *(gather.output[0] for gather in inner)]):
            projections.append(
                _Packed(reshape.input[0], dims[3], dims[4], tuple(parts[place] for place in range(_PARTS)))
            )
    return projections


def _place(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> int | None:
    """Which element of the first axis a Slice is."""
    if node.op_type != "Slice" or node.domain or len(node.input) not in (4, 5):
        return None
    values = [constants.get(name) for name in node.input[1:]]
    if any(value is None or value.size != 1 for value in values):
        return None
    start, end, axis, *steps = (int(value.reshape(-1)[0]) for value in values if value is not None)
    return start if end == start + 1 and axis == 0 and steps in ([], [1]) else None


def _is_squeeze(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> bool:
    axes = constants.get(node.input[1]) if len(node.input) == 2 else None
    return node.op_type == "Squeeze" and not node.domain and axes is not None and axes.tolist() == [0]
