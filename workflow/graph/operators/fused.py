"""Fused groups of elementwise operators that sum their results over rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.rules.size import Shape, Type, size_rule

_WARP, _WARPS, _BLOCKS, _ROWS_A_WARP = 32, 8, 528, 4
"""Of a kernel that sums its results: as in operators.c."""


@size_rule("FusedSums")
def size_of_sums(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """The last output are the sums over rows, of which each warp has its own; see operators.c."""
    if place != len(node.output) - 1:
        return None
    flags = {flag.name: flag.i for flag in node.attribute if flag.type == onnx.AttributeProto.INT}
    summed = types.get(node.output[flags["summed"]])
    return None if summed is None else (TensorProto.FLOAT, shape_of_sums(summed[1], flags["lanes"]))


def shape_of_sums(shape: Shape, lanes: int) -> Shape:
    """Shape of the sums of values of this shape over their rows."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    tiles = -(-width // (_WARP * (lanes if width % lanes == 0 else 1)))
    chunks = max(1, min(_BLOCKS // max(tiles, 1), -(-rows // (_WARPS * _ROWS_A_WARP))))
    return chunks * _WARPS, width
