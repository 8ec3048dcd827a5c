"""Replaces each Concat of numbers of different sizes by an operator that a CUDA graph can contain. Pure.

ONNX Runtime's kernel copies tables of the sizes from the host. Called by step `configure` for GPU runs.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.fusion.source import STORED
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of, import_domain
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.graph.memory.element_types import element_types

MOST = 12
"""Inputs of an operator of ours, at most."""


def put_joins(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with `Join` where the sizes along the axis differ, or are not known."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter, types = Rewriter(copy.graph, CUDA_DOMAIN), element_types(copy)
    for node in rewriter.nodes("Concat"):
        kinds = {types.get(name) for name in node.input}
        if len(kinds) == 1 and kinds <= STORED.keys() and 2 <= len(node.input) <= MOST and _differ(rewriter, node):
            (kind,) = kinds
            out, dims, axis = node.output[0], rewriter.dims(node.output[0]), int(attributes_of(node)["axis"])
            rewriter.drop(node)
            rewriter.describe(out, int(kind or 0), dims)
            rewriter.add("Join", node.input, [out], axis=axis)
    rewriter.finish()
    import_domain(copy, CUDA_DOMAIN)
    return copy


def _differ(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    # Equal sizes are arguments of ONNX Runtime's kernel (`ConcatSameConcatDimImpl`): no table is copied.
    axis, sizes = attributes_of(node)["axis"], set()
    for name in node.input:
        dims = rewriter.dims(name)
        value = rewriter.value(name)
        shape = dims if dims is not None else value.shape if value is not None else None
        if shape is None or not -len(shape) <= axis < len(shape):
            return False
        sizes.add(shape[axis])
    return len(sizes) > 1 or None in sizes
